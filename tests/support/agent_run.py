"""User folder whose rollouts run a script with the package `openai`: parallel sub-agents,
several turns, several choices."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.sessions.frames import session_name
from dora_pipe.producers.worker.request import key_of
from dora_pipe.schemas.context_tokens import contexts_of
from tests.support.user_run import TEMPLATE, trajectories

AGENT = """
import asyncio
import json
from collections import Counter
from pathlib import Path

import openai

CALLS = Path(__file__).parent / "calls.jsonl"


async def run(base_url, api_key, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages, who, **more):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, user=who, max_tokens=6, temperature=0.5,
                extra_body={"return_token_ids": True}, **more,
            )
            for choice in answer.choices:
                call = {"session": base_url.split("/")[-2], "who": who,
                        "prompt": answer.prompt_token_ids, "sampled": choice.token_ids}
                with CALLS.open("a") as file:
                    file.write(json.dumps(call) + "\\n")
            return answer.choices[0].message

        async def talk(who, first):
            messages = [{"role": "user", "content": first}]
            for _ in range(2):
                reply = await ask(messages, who)
                messages += [reply, {"role": "user", "content": "more"}]
            return reply.content

        answers = await asyncio.gather(
            talk("left", row["prompt"]), talk("right", "other " + row["prompt"])
        )
        summed = " ".join(text.encode("ascii", "ignore").decode()[:4] for text in answers)
        last = [{"role": "user", "content": "sum up: " + summed}]
        reply = await ask(last, "main", n=2, stop=list("abcdefghijklmnop"))
        return reply.content
"""

STOPS = tuple("abcdefghijklmnop")
CALL_TOKENS_MAX = 6
"""Same value as in the script."""

CONFIG = """
agent = "agent:run"
[model]
path = "model"
chat_template = "own.jinja"
[sampling]
max_tokens = 100
"""


def furnish_agent(path: Path) -> Path:
    (path / "own.jinja").write_text(TEMPLATE)
    (path / "agent.py").write_text(AGENT)
    text = (path / "config.toml").read_text()
    text = text.replace('[model]\npath = "model"\n', "").replace("steps = 3", "steps = 2")
    text = text.replace("[sampling]\nmax_tokens = 12\n", CONFIG).replace("count = 2", "count = 1")
    text = text.replace("max_model_len = 64", "max_model_len = 256")
    (path / "config.toml").write_text(text)
    return path


def agent_calls(path: Path) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    for line in (path / "calls.jsonl").read_text().splitlines():
        row = json.loads(line)
        results.setdefault(row["session"], []).append(row)
    return results


def check_sampled_tokens_are_logged_once(path: Path) -> None:
    sessions = agent_calls(path)
    actual_trajectories = trajectories(path)
    assert len(actual_trajectories) >= 16
    for trajectory in actual_trajectories:
        answers = sessions[session_name(key_of(trajectory.trajectory, trajectory.meta.attempt))]
        assert len(answers) == 6
        logged = [
            tuple(trajectory.token_ids[call.start : call.end]) for call in trajectory.meta.calls
        ]
        assert sorted(logged) == sorted(tuple(answer["sampled"]) for answer in answers)
        assert sum(trajectory.loss_mask) == sum(len(answer["sampled"]) for answer in answers)
        assert trajectory.reward is not None


def check_answers_stand_behind_their_prompts(path: Path) -> None:
    sessions = agent_calls(path)
    for trajectory in trajectories(path):
        contexts = [context.token_ids.tolist() for context in contexts_of(trajectory)]
        for answer in sessions[
            session_name(key_of(trajectory.trajectory, trajectory.meta.attempt))
        ]:
            full = [*answer["prompt"], *answer["sampled"]]
            assert any(context[: len(full)] == full for context in contexts)
        assert {call.caller for call in trajectory.meta.calls} == {"left", "right", "main"}
        assert all(call.ignored_settings == {"temperature": 0.5} for call in trajectory.meta.calls)
        assert 3 <= len(contexts) <= 6, "a second turn goes on behind the first"


def check_calls_end_where_they_asked(path: Path) -> None:
    tokenizer, ended = Tokenizer(path / "model"), 0
    for trajectory in trajectories(path):
        for call in trajectory.meta.calls:
            assert call.stop == (STOPS if call.caller == "main" else ())
            ids = list(trajectory.token_ids[call.start : call.end])
            assert not set(call.stop) & set(tokenizer.full_text(ids[:-1]))
            ends = bool(set(call.stop) & set(tokenizer.full_text(ids)))
            assert not ends or call.finish == "stop"
            ended += ends and len(ids) < CALL_TOKENS_MAX
    assert ended > 0


def versions_at_once(path: Path) -> int:
    changes: list[tuple[int, int, int, str]] = []
    for trajectory in trajectories(path):
        (worker,) = {segment.worker for segment in trajectory.segments if segment.kind == "model"}
        asked = min(call.asked_ns for call in trajectory.meta.calls)
        answered = max(call.answered_ns for call in trajectory.meta.calls)
        changes += [
            (asked, 1, trajectory.version, worker),
            (answered, -1, trajectory.version, worker),
        ]
    opened: dict[str, Counter[int]] = {}
    most = 0
    for _, change, version, worker in sorted(changes):
        here = opened.setdefault(worker, Counter())
        here[version] += change
        most = max(most, sum(count > 0 for count in here.values()))
    return most

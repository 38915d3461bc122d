"""A whole run whose rollouts are a script of the package `openai`: two sub-agents at the same time,
several turns, a compaction. What the script was told is what the log has, each token once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dora_pipe.audit.reading import records_of
from dora_pipe.bus.port import TopicPartition
from dora_pipe.launch.run_dir import opened
from dora_pipe.producers.sessions.addresses import session_name
from dora_pipe.producers.worker.request import key_of
from dora_pipe.schemas.contexts import contexts_of
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from tests.support.user_run import assert_clean, call, furnish, steps

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)

AGENT = """
import asyncio
import json
from pathlib import Path

import openai

TOLD = Path(__file__).parent / "told.jsonl"


async def run(base_url, api_key, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages, who, **more):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, user=who, max_tokens=6, temperature=0.5,
                extra_body={"return_token_ids": True}, **more,
            )
            for choice in answer.choices:
                told = {"session": base_url.split("/")[-2], "who": who,
                        "prompt": answer.prompt_token_ids, "sampled": choice.token_ids}
                with TOLD.open("a") as file:
                    file.write(json.dumps(told) + "\\n")
            return answer.choices[0].message

        async def talk(who, first):
            messages = [{"role": "user", "content": first}]
            for _ in range(2):
                said = await ask(messages, who)
                messages += [said, {"role": "user", "content": "more"}]
            return said.content

        found = await asyncio.gather(
            talk("left", row["prompt"]), talk("right", "other " + row["prompt"])
        )
        summed = " ".join(text.encode("ascii", "ignore").decode()[:4] for text in found)
        said = await ask([{"role": "user", "content": "sum up: " + summed}], "main", n=2)
        return said.content
"""

CONFIG = """
agent = "agent:run"
calls_open_max = 4
[model]
path = "model"
chat_template = "own.jinja"
[sampling]
max_tokens = 100
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder after a run."""
    place = furnish(tmp_path_factory.mktemp("agent"))
    (place / "own.jinja").write_text(TEMPLATE)
    (place / "agent.py").write_text(AGENT)
    text = (place / "config.toml").read_text()
    text = text.replace('[model]\npath = "model"\n', "").replace("steps = 3", "steps = 2")
    text = text.replace("[sampling]\nmax_tokens = 12\n", CONFIG).replace("count = 2", "count = 1")
    text = text.replace("context_tokens = 64", "context_tokens = 256")
    (place / "config.toml").write_text(text)
    assert call(place, "run", "config.toml") == 0, (place / "said").read_text()
    return place


def trajectories(place: Path) -> list[Trajectory]:
    with opened(str(place / "runs" / "tiny")) as run:
        topic = run.topics.trajectories
        ends = {one: run.bus.end(one) for one in (TopicPartition(topic, at) for at in range(4))}
        return [decode_trajectory(record.value) for record in records_of(run.bus, ends)]


def told(place: Path) -> dict[str, list[dict[str, Any]]]:
    """What the scripts were told, by session."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (place / "told.jsonl").read_text().splitlines():
        one = json.loads(line)
        found.setdefault(one["session"], []).append(one)
    return found


def test_what_the_script_was_told_is_what_the_log_has_each_token_once(place: Path) -> None:
    assert steps(place, "tiny") == [0, 1]
    sessions = told(place)
    found = trajectories(place)
    assert len(found) >= 16
    for one in found:
        answers = sessions[session_name(key_of(one.trajectory, one.meta.attempt))]
        assert len(answers) == 6
        logged = [tuple(one.token_ids[call.start : call.end]) for call in one.meta.calls]
        assert sorted(logged) == sorted(tuple(answer["sampled"]) for answer in answers)
        assert sum(one.loss_mask) == sum(len(answer["sampled"]) for answer in answers)
        assert one.reward is not None


def test_every_answer_stands_behind_its_prompt_in_a_context(place: Path) -> None:
    sessions = told(place)
    for one in trajectories(place):
        contexts = [context.token_ids.tolist() for context in contexts_of(one)]
        for answer in sessions[session_name(key_of(one.trajectory, one.meta.attempt))]:
            whole = [*answer["prompt"], *answer["sampled"]]
            assert any(context[: len(whole)] == whole for context in contexts)
        assert {call.caller for call in one.meta.calls} == {"left", "right", "main"}
        assert all(call.asked == {"temperature": 0.5} for call in one.meta.calls)
        assert 3 <= len(contexts) <= 6, "a second turn goes on behind the first"


def test_the_run_holds_and_is_made_again(place: Path) -> None:
    assert_clean(place, "tiny")
    assert call(place, "replay", "tiny") == 0, (place / "said").read_text()
    assert call(place, "replay", "tiny", "--random", "4") == 0, (place / "said").read_text()
    assert "4 of 4 trajectories bit-equal" in (place / "said").read_text()

"""Tests of chats by task: checks at startup, logged facts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config.model import Task
from dora_pipe.config.several import PoolSpec, pool_specs
from dora_pipe.core.errors import ConfigError, PolicyError
from dora_pipe.launch.model_checks import check_chat
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.template_features import PROBE_TOOL
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    PromptCall,
    PromptReady,
    RewardCall,
    SampledTurns,
    TaskFacts,
    TaskFailed,
)
from dora_pipe.producers.worker.chats import chat_options, chats_of, digest_of, recorded_chats
from dora_pipe.producers.worker.ports import TaskPort
from tests.support.chat_models import CHATML, write_chat_model
from tests.support.cluster import make_config
from tests.support.inline_tasks import InlineTasks

ASKED = ({"role": "user", "content": "1+2?"},)
SYSTEM = ({"role": "system", "content": "Be brief."}, *ASKED)


class Pool(InlineTasks):
    def __init__(
        self, ready: dict[str, Any] | None, *, error: str = "KeyError", single_turn: bool = True
    ) -> None:
        prompt = None if ready is None else {"text": "", "episode": False, **ready}
        super().__init__(
            prompt=lambda call: (
                TaskFailed(request=call.request, error=error, message="'x'")
                if prompt is None
                else PromptReady(request=call.request, **prompt)
            )
        )
        digest = "d" * 64
        self.facts = TaskFacts(
            train_digest=digest,
            train_rows=1,
            eval_digest=digest,
            eval_rows=1,
            reward_digest="",
            single_turn=single_turn,
        )

    def poll(self, timeout_s: float = 0.0) -> Sequence[Any]:
        return super().poll()


def chats(folder: Path, pool: Pool, **task: Any) -> dict[str, Chat]:
    spec = PoolSpec(task=Task(kind="arithmetic", **task), sources=("train", "eval"))
    pools: Any = [(spec, pool)]
    return chats_of(pools, 0, folder, Tokenizer(folder), stop=lambda: False)


@pytest.mark.parametrize("ready", [{"text": "1+2="}, None])
def test_a_task_whose_prompts_are_text_has_no_chat(
    ready: dict[str, Any] | None, tmp_path: Path
) -> None:
    pool = Pool(ready)
    assert chats(write_chat_model(tmp_path, text=CHATML), pool) == {}
    assert pool.forgotten == ["first-prompt"]
    assert digest_of({}) == ""


@pytest.mark.parametrize("episode", [False, True])
def test_messages_for_a_model_without_a_template_are_refused_at_the_start(
    episode: bool, tmp_path: Path
) -> None:
    write_chat_model(tmp_path, text=CHATML)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(PolicyError, match="need a chat template"):
        chats(tmp_path, Pool({"messages": ASKED, "episode": episode}, single_turn=not episode))
    assert chats(tmp_path, Pool({"text": "1+2=", "episode": episode}, single_turn=False)) == {}


@pytest.mark.parametrize(
    ("name", "ready", "why"),
    [
        ("glm4moe", {"messages": ASKED, "episode": True}, "no bridge between turns: message 2"),
        ("gemma", {"messages": SYSTEM}, "the first row's prompt: .* ignores system message"),
        ("gemma", {"messages": ASKED, "tools": (PROBE_TOOL,)}, "no parser for"),
    ],
)
def test_a_template_that_does_not_do_for_a_task_is_refused(
    name: str, ready: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        chats(write_chat_model(tmp_path, name), Pool(ready))


def test_a_first_row_that_is_no_prompt_is_refused(tmp_path: Path) -> None:
    pool = Pool(None, error="NoAnswer")
    with pytest.raises(ConfigError, match="the first row's prompt: 'x'"):
        chats(write_chat_model(tmp_path, text=CHATML), pool)
    assert pool.forgotten == ["first-prompt"]


def test_the_chats_of_a_run_are_known_again_by_their_digest(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_model(tmp_path, text=CHATML))
    config = make_config()
    tasks = [Task(kind="arithmetic", name=name, chat_template_kwargs={"x": name}) for name in "ab"]
    several = msgspec.structs.replace(config, task=tasks[0], more_tasks=tuple(tasks[1:]))
    sources = {source for spec in pool_specs(several) for source in spec.sources}
    every = recorded_chats(several, 0, tmp_path, tokenizer, {"another"})
    assert every.keys() == sources
    (subset,) = [entry for entry in every if entry.startswith("train") and entry.endswith("a")]
    chats = recorded_chats(several, 0, tmp_path, tokenizer, {every[subset].digest})
    assert subset in chats and len(chats) < len(every)
    assert digest_of(chats) != digest_of(every) != ""
    assert recorded_chats(several, 0, tmp_path, tokenizer, set()) == {}


@pytest.mark.parametrize(
    ("text", "parser", "noted"),
    [
        (CHATML, "auto", False),
        ("{{ tools | tojson if tools else '' }}" + CHATML, "auto", True),
        ("{{ tools | tojson if tools else '' }}" + CHATML, "hermes", False),
    ],
)
def test_an_agent_whose_calls_nothing_reads_is_noted_at_the_start(
    text: str, parser: str, noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_chat_model(tmp_path, text=text)
    task = Task(kind="dataset", agent="agent:run", tool_parser=parser)
    pool: Any = None  # Agents have their own prompts.
    check_chat(PoolSpec(task=task, sources=("train",)), pool, folder)
    assert ("set task.tool_parser" in capsys.readouterr().err) == noted


def test_a_digest_is_of_the_template_and_not_of_a_moment(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path, text="{{ strftime_now('%d') }}" + CHATML)
    tokenizer, task = Tokenizer(folder), Task(kind="arithmetic")
    early, late = (
        Chat.open(folder, tokenizer, chat_options(task, position)) for position in (0, 10**18)
    )
    assert early.start(ASKED).prompt_ids != late.start(ASKED).prompt_ids
    assert early.digest == late.digest


def test_a_conversation_lasts_until_its_reward_is_asked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_model(tmp_path, text=CHATML))
    pool = Pool({"messages": SYSTEM, "episode": True}, single_turn=False)
    replies = {"role": "user", "content": "Again."}
    pool.step = lambda call: EnvObserved(
        request=call.request, text="", messages=(replies,), done=False, tool="", ok=True
    )
    port = TaskPort(pool, tokenizer, chats(tmp_path, pool)["train"])
    (end,) = tokenizer.ids("x")[-1:]
    port.start(PromptCall(request="r", split="train", index=0))
    assert len(port.poll()) == 1
    first, last = tokenizer.ids("three"), [*tokenizer.ids("3"), end]
    port.start(EnvStep(request="r", token_ids=first))
    (observed,) = port.poll()
    assert isinstance(observed, EnvObserved)
    assert tokenizer.full_text(observed.token_ids) == (
        "<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"
    )
    sampled = SampledTurns(answer=last, turns=[first, observed.token_ids, last])
    asked = RewardCall(request="r", split="train", index=0, sampled=sampled)
    port.start(asked)
    call = pool.seen[-1]
    assert isinstance(call, RewardCall)
    assert [message["content"] for message in call.completion.messages] == [
        "Be brief.",
        "1+2?",
        "three",
        "Again.",
        "3x",
    ]
    port.poll()
    sampled = SampledTurns(answer=last, turns=[last])
    port.start(RewardCall(request="r", split="train", index=0, sampled=sampled))
    assert pool.seen[-1].completion.messages == ()  # type: ignore[union-attr]

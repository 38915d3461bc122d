"""The calculator as its example has it: a tool of the model's, from token ids to token ids."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.load import load_config
from dora_pipe.launch.examples import write_word_tokenizer
from dora_pipe.producers.chat.chat import Chat, ChatOptions
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calculator import CHAT_TEMPLATE, ROLES, WORDS
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    SampledTurns,
)
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.producers.worker.ports import TaskPort
from tests.support.task_pool import DEADLINE_S
from tests.support.tidy import ROOT

TASK = load_config(ROOT / "examples" / "calculator.toml", ()).task
ROW = open_task(TASK).rows("train")[0]
NUMBERS: list[int] = ROW["numbers"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_word_tokenizer(tmp_path, WORDS, ROLES)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return Tokenizer(tmp_path)


@pytest.fixture
def port(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[TaskPort]:
    chat = Chat.open(tmp_path, tokenizer, ChatOptions(tool_parser=TASK.tool_parser))
    with TaskPool(TASK) as pool:
        yield TaskPort(pool, tokenizer, chat)


def ask(port: TaskPort, effect: Any) -> Any:
    port.start(effect)
    end = time.monotonic() + DEADLINE_S
    results: list[Any] = []
    while not results and time.monotonic() < end:
        results = port.poll()
    return results[0]


def test_an_episode_of_calls_goes_from_ids_to_ids(port: TaskPort, tokenizer: Tokenizer) -> None:
    ready = ask(port, PromptCall(request="a", split="train", index=0))
    assert isinstance(ready, PromptReady)
    named = " ".join(f"n{len(NUMBERS) - index} {number}" for index, number in enumerate(NUMBERS))
    assert tokenizer.full_text(ready.token_ids) == (
        f"<|tools|> calculator <eos> <|user|> {named} <eos> <|assistant|>"
    )
    total, turns = NUMBERS[0], []
    for number in NUMBERS[1:]:
        turns.append([*tokenizer.ids(f"n1 call calculator {total} {number} "), 2])
        observed = ask(port, EnvStep(request="a", token_ids=turns[-1]))
        total = (total + number) % 100
        assert isinstance(observed, EnvObserved)
        assert (observed.tool, observed.ok, observed.done) == ("calculator", True, False)
        assert tokenizer.full_text(observed.token_ids) == f"<|tool|> {total} <eos> <|assistant|>"
        turns.append(list(observed.token_ids))
    turns.append([*tokenizer.ids(f"answer {total}"), 2])
    observed = ask(port, EnvStep(request="a", token_ids=turns[-1]))
    assert (observed.done, list(observed.token_ids)) == (True, [])
    sampled = SampledTurns(answer=turns[-1], turns=turns)
    scored = RewardCall(request="a", split="train", index=0, sampled=sampled)
    assert ask(port, scored) == Rewarded(request="a", reward=1.0, raw=None, parts={})


def test_a_call_that_cannot_be_made_is_told_and_costs_a_turn(
    port: TaskPort, tokenizer: Tokenizer
) -> None:
    ask(port, PromptCall(request="a", split="train", index=0))
    observed = ask(
        port, EnvStep(request="a", token_ids=[*tokenizer.ids("n1 call calculator 7"), 2])
    )
    assert (observed.tool, observed.ok, observed.done) == ("calculator", False, False)
    assert tokenizer.full_text(observed.token_ids).startswith("<|tool|> <unk>")


def test_another_episode_of_the_row_that_is_told_the_same_turns_answers_with_the_same_tokens(
    port: TaskPort, tokenizer: Tokenizer
) -> None:
    turns = [
        [*tokenizer.ids("n1 call calculator 7 5 "), 2],
        [*tokenizer.ids("n1 call calculator 7"), 2],
        [*tokenizer.ids("n2 call calculator 5 9 "), 2],
    ]
    heard = []
    for request in ("a/1", "a/2"):
        ready = ask(port, PromptCall(request=request, split="train", index=0))
        assert ready.replayable
        heard.append([ready.token_ids])
        for turn in turns:
            observed = ask(port, EnvStep(request=request, token_ids=turn))
            heard[-1].append((list(observed.token_ids), observed.tool, observed.ok, observed.done))
    assert heard[0] == heard[1]

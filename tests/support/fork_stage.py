"""In-process continuation of trajectories and evaluations, with the run's tasks, tokenizer and
engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dora_pipe.analysis import probes
from dora_pipe.cli import fork
from dora_pipe.config import model
from dora_pipe.config.load import dump_toml
from dora_pipe.core.loop.runtime import Runtime
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.engines.simulated import SimulatedEngine, long_tailed_length
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    RewardCall,
    Rewarded,
    TaskEvent,
    TaskFacts,
)
from dora_pipe.producers.worker import role
from dora_pipe.sim.parts import Numbers
from dora_pipe.sim.roles import DATASET, EVAL_DATASET
from dora_pipe.store.store import PolicyStore
from tests.support.cluster import Cluster, make_config, reward_by_text
from tests.support.inline_tasks import InlineTasks
from tests.support.recorded_run import RecordedRun

TURNS = 4


def digest(text: str) -> int:
    return Random(text).randrange(1 << 30)


@dataclass
class Puzzles(InlineTasks):
    """Episodes whose answers depend on the last turn and whose rewards depend on all turns."""

    slip: str = ""
    """Salt of the answers."""

    def __post_init__(self) -> None:
        self.episodes = self.replayable = True
        self.told: dict[str, int] = {}
        self.step, self.reward = self._respond, self._score

    def _respond(self, call: EnvStep) -> TaskEvent:
        turn = self.told[call.request] = self.told.get(call.request, 0) + 1
        chance = digest(f"{call.turn.text}{self.slip}")
        text = " ".join(str(index) for index in range(10, 10 + chance % 4))
        done = turn >= TURNS
        return EnvObserved(request=call.request, text=text, done=done, tool="calc", ok=True)

    def _score(self, call: RewardCall) -> TaskEvent:
        self.told.pop(call.request, None)
        reward = float(digest(str(call.completion.turns)) % 2)
        return Rewarded(request=call.request, reward=reward, raw=None, parts={})


def single_turns() -> InlineTasks:
    return InlineTasks(reward=reward_by_text)


def record(directory: Path, tasks: Callable[[], InlineTasks], **changes: Any) -> RecordedRun:
    plain = {"run__steps": 1, "run__name": "short", "evaluation__prompts": 0}
    config = make_config(**{**plain, "task__max_turns": TURNS, **changes})
    with Cluster(directory, config, tasks=tasks) as cluster:
        (directory / "config.toml").write_text(dump_toml(config))
        cluster.run()
    return RecordedRun(directory=directory, run="short")


def engine(*, assets: Path, config: model.Config, decode: Any) -> SimulatedEngine:
    workers = config.workers
    return SimulatedEngine(
        slots=workers.max_num_seqs, context_tokens=workers.max_model_len, lengths=long_tailed_length
    )


class _Words(Numbers):
    stop_ids = (2,)

    def __init__(self, assets: Path) -> None:
        assert assets.is_dir()

    def reading(self, special_tokens: str) -> _Words:
        return self

    def full_text(self, ids: Sequence[int]) -> str:
        return self.text(ids)


def install(
    monkeypatch: pytest.MonkeyPatch, tasks: Callable[[], InlineTasks], **facts: Any
) -> None:
    """Run workers of commands with these tasks in this process."""

    class Pool:
        def __init__(self, task: model.Task, *, clock: Clock) -> None:
            self._tasks, self.failing = tasks(), ()
            episodes = self._tasks.episodes
            self.facts = TaskFacts(
                **{
                    "train_digest": DATASET,
                    "train_rows": 8,
                    "eval_digest": EVAL_DATASET,
                    "eval_rows": 8,
                    "reward_digest": "c" * 64,
                    "single_turn": not episodes,
                    "replayable": self._tasks.replayable or task.replayable,
                    **facts,
                }
            )

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tasks, name)

        def wait(self) -> TaskFacts:
            return self.facts

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            self._tasks.close()

    monkeypatch.setattr(role, "TaskPool", Pool)
    monkeypatch.setattr(probes, "TaskPool", Pool)
    monkeypatch.setattr(role, "Runtime", partial(Runtime, turn_ns=0))
    monkeypatch.setattr(role, "Tokenizer", _Words)
    monkeypatch.setattr(probes, "Tokenizer", _Words)
    monkeypatch.setattr(role, "check_data", lambda facts, run, sources: None)
    monkeypatch.setattr(role, "chats_of", lambda *_, **__: {})
    monkeypatch.setattr(role, "_checked_assets", lambda here: here.store.assets("none"))
    monkeypatch.setattr(PolicyStore, "assets", lambda store, digest: store.root)
    for command in (fork, probes):
        monkeypatch.setattr(command, "open_engine", engine)
    monkeypatch.setattr(fork, "decoder_of", lambda run: Numbers().text)

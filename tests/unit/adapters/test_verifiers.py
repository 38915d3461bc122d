"""Tests of verifiers environments as tasks; some need .venv-verifiers (`make test-verifiers`)."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_pipe.config.checks import problems_of
from dora_pipe.config.model import Task
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.adapters.verifiers import (
    SessionInterception,
    VerifiersError,
    reward_of,
    session_client,
)
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calls import AgentCall, AgentEnded, TaskEvent
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.task import Retry, Reward
from dora_pipe.producers.worker.effects import AnswerCall, CallAsked
from tests.support.adapters_of_others import installed, task_of
from tests.support.chat_models import write_chat_model
from tests.support.cluster import make_config
from tests.support.endpoints import Stage, says, stage
from tests.support.tidy import ROOT

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
EXAMPLE = ROOT / "examples" / "verifiers"
LOCAL: dict[str, Any] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}

there = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-verifiers: make test-verifiers")


@pytest.mark.skipif(installed("verifiers"), reason="it is here")
def test_verifiers_that_is_missing_is_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="verifiers is not installed in") as refused:
        task_of("verifiers:sums")
    assert "task.python" in str(refused.value.hint)


@pytest.mark.parametrize("version", ["0.1.14", "0.40.0", "1.0"])
def test_another_version_of_verifiers_is_named_with_what_to_do_and_not_imported(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / f"verifiers-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    (tmp_path / "verifiers.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as refused:
        task_of("verifiers:sums")
    text = f"`verifiers:sums`: verifiers is {version} in {sys.executable}, not 0.4.*"
    assert refused.value.message == f"task.kind: {text}"
    assert '"verifiers==0.4.*" and msgspec' in str(refused.value.hint)


def test_an_agent_beside_the_environment_s_own_is_refused() -> None:
    assert Task(kind="verifiers:sums").has_agent
    config = make_config(task__kind="verifiers:sums", task__agent="agent:run")
    texts = [problem.text for problem in problems_of(config)]
    assert "task.agent: `verifiers:sums` brings its own agent" in texts


@dataclass(kw_only=True)
class Client:
    base_url: str
    api_key_var: str
    api_key: str = ""


@dataclass(frozen=True, kw_only=True)
class Context:
    client: Any


@dataclass(kw_only=True)
class Rollout:
    ctx: Context
    client: Any = None
    trace_stops: list[Any] = field(default_factory=list)


class Inner:
    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    @asynccontextmanager
    async def acquire(self, session: Rollout) -> AsyncIterator[str]:
        config = session.ctx.client
        session.client = self.kept.setdefault(config.base_url, Client(**vars(config)))
        yield "slot"


VF = SimpleNamespace(EvalClientConfig=Client, Trace=object)


def test_each_rollout_calls_its_own_session_and_no_client_is_kept_for_it() -> None:
    inner = Inner()
    interception = SessionInterception(VF, inner)

    async def play(url: str, key: str) -> tuple[str, str, str]:
        with session_client(VF, url, key) as config:
            rollout = Rollout(ctx=Context(client=config))
            async with interception.acquire(rollout) as slot:
                await asyncio.sleep(0)
                assert slot == "slot" and rollout.ctx.client is config
                return rollout.client.base_url, rollout.client.api_key, config.api_key_var

    async def both() -> tuple[tuple[str, str, str], tuple[str, str, str]]:
        return await asyncio.gather(play("http://a/v1", "ka"), play("http://b/v1", "kb"))

    first, second = asyncio.run(both())
    assert (first[:2], second[:2]) == (("http://a/v1", "ka"), ("http://b/v1", "kb"))
    assert len(inner.kept) == 1 and all("API_KEY" in entry[2] for entry in (first, second))
    assert not {first[2], second[2]} & os.environ.keys()


@pytest.mark.parametrize(
    ("finish", "asked", "stopped"),
    [("length", None, True), ("length", 8, False), ("stop", None, False)],
)
def test_what_a_limit_of_the_run_has_cut_is_stopped(
    finish: str, asked: int | None, stopped: bool
) -> None:
    rollout = Rollout(ctx=Context(client=None))
    call = SimpleNamespace(finish_reason=finish, sampling=SimpleNamespace(max_tokens=asked))

    async def play() -> bool:
        with session_client(VF, "http://a/v1", "k") as config:
            rollout.ctx = Context(client=config)
            async with SessionInterception(VF, Inner()).acquire(rollout):
                (stop,) = rollout.trace_stops
                assert not stop(SimpleNamespace(calls=[]))
                return bool(stop(SimpleNamespace(calls=[call])))

    assert asyncio.run(play()) is stopped


def trace(seat: str, *, metrics: dict[str, float] | None = None, **rewards: float | None) -> Any:
    given = {
        name: None if value is None else SimpleNamespace(value=value)
        for name, value in rewards.items()
    }
    return SimpleNamespace(
        agent=SimpleNamespace(name=seat),
        rewards=given,
        metrics=metrics or {},
        reward=sum(record.value for record in given.values() if record is not None),
        errors=[],
    )


def episode(*traces: Any, ok: bool = True, errors: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(ok=ok, traces=list(traces), errors=list(errors))


def test_the_reward_is_the_mean_of_the_policy_s_traces_with_its_parts() -> None:
    played = episode(
        trace("solver", exact=1.0, short=0.5, metrics={"calls": 2.0, "odd": float("nan")}),
        trace("solver", exact=0.0, short=0.5, metrics={"calls": 4.0}),
        trace("judge", fair=9.0),
    )
    reward = reward_of(played, "solver")
    assert reward.value == 1.0
    assert reward.parts == {"calls": 3.0, "exact": 0.5, "short": 0.5}
    assert reward_of(episode(trace("", exact=1.0)), "agent").value == 1.0
    for unscored in (trace("", exact=None), trace("")):
        with pytest.raises(VerifiersError, match="not scored"):
            reward_of(episode(unscored), "agent")


@pytest.mark.parametrize(
    ("kind", "status", "again"),
    [
        ("SandboxError", None, True),
        ("ProviderError", 503, True),
        ("ProviderError", 400, False),
        ("TaskError", None, False),
    ],
)
def test_what_failed_outside_is_tried_again(kind: str, status: int | None, again: bool) -> None:
    error = SimpleNamespace(type=kind, message="no", status_code=status)
    with pytest.raises(Retry if again else VerifiersError, match=f"{kind}: no"):
        reward_of(episode(ok=False, errors=(error,)), "agent")


def opened(**task: Any) -> TaskPool:
    given = {"kind": "verifiers:sums", "python": str(PYTHON), "directory": str(EXAMPLE), **task}
    return TaskPool(Task(**given))


@there
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "text"),
    [
        ({"kind": "verifiers:no_such"}, "taskset 'no_such' not found"),
        ({"options": {}}, "no runtime for the programs of `agent`"),
        ({"options": {"env": {"agnt": {}}}}, "agnt"),
        ({"options": {"env": {"agent": {**LOCAL, "harness": {"id": "codex"}}}}}, "container"),
        (
            {"options": {"env": {"agent": LOCAL, "taskset": {"count": 8}}}},
            "8 tasks, all used for evaluation",
        ),
    ],
)
def test_what_cannot_be_played_is_refused_before_anything_starts(
    task: dict[str, Any], text: str
) -> None:
    with opened(**task) as pool, pytest.raises((ConfigError, TaskError), match=re.escape(text)):
        pool.wait()


@there
@pytest.mark.slow
def test_the_configuration_of_the_page_opens() -> None:
    page = (ROOT / "docs" / "environments.md").read_text().partition("## Verifiers")[2]
    block = tomllib.loads(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])["task"]
    with opened(**{**block, "python": str(PYTHON)}) as pool:
        facts = pool.wait()
    assert (facts.train_rows, facts.eval_rows) == (1024 - 64, 64)
    assert facts.packages.keys() == {"verifiers", "tool-sums", "calculator-server"}
    assert not facts.single_turn


ROLLOUTS = 3
PATIENCE_S = 300.0
"""Seconds for rollouts, whose Python processes import much."""

SUM = re.compile(r"n\d+ \d+(?: n\d+ \d+)+")
"""Question of the example's rows."""


class Policy:
    def __init__(self, assets: Path, say: Callable[[CallAsked, str], str], together: int) -> None:
        self._assets, self._say, self._together = assets, say, together
        self._text = Tokenizer(assets).full_text
        self._open: list[CallAsked] = []
        self.stage: Stage | None = None

    def __call__(self, asked: CallAsked) -> AnswerCall | None:
        if asked.request == "user/0":
            return self._answer(asked)
        self._open.append(asked)
        if len(self._open) == self._together:
            assert self.stage is not None
            for entry in self._open:
                self.stage.port.start(self._answer(entry))
        return None

    def _answer(self, asked: CallAsked) -> AnswerCall:
        say = self._say(asked, self._text(asked.token_ids))
        return says(self._assets, f"{say}<|im_end|>")(asked)


def rewards(policy: Policy, stage: Stage, env: dict[str, Any]) -> list[Reward]:
    policy.stage = stage
    options = {"env": env, "count": ROLLOUTS, "eval_count": 1}
    events: list[TaskEvent] = []
    with opened(options=options, episode_timeout_s=PATIENCE_S) as pool:
        pool.wait()
        for index in range(ROLLOUTS):
            url, key = stage.open(f"g-{index}/0")
            call = AgentCall(
                request=f"g-{index}/0", split="train", index=index, base_url=url, api_key=key
            )
            pool.submit(call)
        end = time.monotonic() + PATIENCE_S
        while len(events) < ROLLOUTS and time.monotonic() < end:
            events += pool.poll(0.1)
    ended = {ended.request: ended.rewarded for ended in events if isinstance(ended, AgentEnded)}
    given = [ended.get(f"g-{index}/0") for index in range(ROLLOUTS)]
    assert all(given), events
    return [Reward(value=entry.reward, parts=dict(entry.parts)) for entry in given if entry]


@there
@pytest.mark.slow
def test_rollouts_at_once_of_one_environment_each_call_their_own_session(tmp_path: Path) -> None:
    assets = write_chat_model(tmp_path, "qwen2_5")
    asked: dict[str, list[str]] = {}

    def say(call: CallAsked, prompt: str) -> str:
        (words,) = SUM.findall(prompt)
        tries = asked.setdefault(call.request, [])
        tries.append(words)
        right = int(call.request[2]) + len(tries) <= 2
        return f"answer {sum(map(int, words.split()[1::2])) % 100 if right else 'none'}"

    policy = Policy(assets, say, together=2 * ROLLOUTS)
    env = {"id": "best-of-n", "n": 2, "max_concurrent_agents": 2, "agent": LOCAL}
    with stage(assets, policy) as opened:
        given = rewards(policy, opened, env)
    assert [reward.value for reward in given] == [1.0, 0.5, 0.0]
    assert [reward.parts["pass_at_n"] for reward in given] == [1.0, 1.0, 0.0]
    assert {request: len(tries) for request, tries in asked.items()} == {
        f"g-{index}/0": 2 for index in range(ROLLOUTS)
    }
    assert all(len(set(tries)) == 1 for tries in asked.values())
    assert len({words for tries in asked.values() for words in tries}) == ROLLOUTS

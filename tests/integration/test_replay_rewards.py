"""Logged rewards asked for again: equal, or named where the task says otherwise.

Method: the recorded run's task is a function of text and id, so it gives every reward again; then
the log is forged from end to end, as no audit can see it, or the task answers otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.rescore import Rescored, raise_if_different, rescore
from dora_pipe.config.load import dump_toml
from dora_pipe.core.errors import InvariantBroken, ReplayDiverged
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    TaskEvent,
    TaskFacts,
    TaskFailed,
)
from dora_pipe.producers.tasks.registry import check_data
from dora_pipe.producers.worker.ports import TaskPort
from dora_pipe.schemas.control import RunStarted, TrajectoriesLogged
from dora_pipe.schemas.trajectory import Trajectory, turns_of
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.sim.parts import Numbers
from tests.support import damage
from tests.support.branched_run import branched
from tests.support.cluster import Cluster, make_config, reward_by_text
from tests.support.command_line import Call, caller
from tests.support.inline_tasks import InlineTasks, episode_tasks, failed
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Tamper
from tests.support.task_again import AssetsNumbers, PoolTasks, ask_here
from tests.support.worker import VirtualClock


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command line: exit code, stdout, stderr. Task and tokenizer are in process."""
    ask_here(monkeypatch, _Pool)
    return caller(monkeypatch, capsys)


class _Facts:
    scores_groups = False
    single_turn = True
    reward_digest = "d" * 64


class _Pool(PoolTasks):
    def __init__(self, task: object) -> None:
        super().__init__(reward=reward_by_text)

    def wait(self) -> _Facts:
        return _Facts()


def _logged(log: Tamper) -> list[Trajectory]:
    bound = {(fact.partition, fact.offset): fact for *_, fact in log.logged()}
    rows = [row for row in log.rows("trajectories") if (row.partition, row.offset) in bound]
    return [decode_trajectory(row.value) for row in rows]


def _again(
    trajectories: Iterable[Trajectory], tasks: InlineTasks, *, stopped: bool = True
) -> list[Rescored]:
    port = TaskPort(tasks, Numbers())
    return list(rescore(port, trajectories, clock=VirtualClock(), stopped=lambda ids: stopped))


def test_every_reward_comes_out_again(recorded: RecordedRun) -> None:
    with Tamper(recorded) as log:
        trajectories = _logged(log)
    found = _again(trajectories, InlineTasks(reward=reward_by_text))
    assert [one for one in found if not one.equal] == []
    assert {one.trajectory for one in found} == {one.trajectory for one in trajectories}
    assert any(one.recorded is None for one in found), "the run has rewards that are not valid"
    assert any(one.trajectory.startswith("e") for one in found), "evaluations are among them"


@pytest.mark.parametrize("damaging", [damage.remove_trajectory, damage.change_token])
def test_damaged_record_is_not_asked_for_but_named_behind_the_rest(
    copy: RecordedRun, call: Call, recorded: RecordedRun, damaging: Callable[[Tamper], str]
) -> None:
    with Tamper(copy) as log:
        name = damaging(log)
    code, _, err = call("replay", str(copy.directory), "--rewards")
    assert code == 5
    assert any(line.startswith(f"{name}: ") for line in err.splitlines()), err
    assert "1 trajectory that was logged is damaged, and not asked for" in err
    assert "238 of 238 rewards as recorded" in err


@pytest.mark.parametrize("special_tokens", ["text", "parse"])
def test_texts_are_encoded_as_the_workers_of_the_run_encoded_them(
    call: Call, tmp_path: Path, special_tokens: Literal["text", "parse"]
) -> None:
    config = make_config(
        run__name="again", run__steps=1, evaluation__prompts=0, task__special_tokens=special_tokens
    )
    with Cluster(tmp_path / "again", config) as cluster:
        cluster.run()
    (tmp_path / "again" / "config.toml").write_text(dump_toml(config))
    AssetsNumbers.made.clear()
    code, _, err = call("replay", str(tmp_path / "again"), "--rewards")
    assert (code, AssetsNumbers.made) == (0, [special_tokens]), err


@pytest.mark.parametrize("field", ["dataset_rows", "eval_rows"])
def test_data_say_how_many_rows_their_digest_has(recorded: RecordedRun, field: str) -> None:
    with Tamper(recorded) as log:
        ((_, started),) = log.facts(RunStarted)
    facts = TaskFacts(
        train_digest=started.dataset_digest,
        train_rows=started.dataset_rows,
        eval_digest=started.eval_digest,
        eval_rows=started.eval_rows,
        reward_digest="",
    )
    check_data(facts, started, ("train", "eval"))
    forged = msgspec.structs.replace(started, **{field: getattr(started, field) + 1})
    with pytest.raises(InvariantBroken, match="with its digest has") as caught:
        check_data(facts, forged, ("train", "eval"))
    assert f"logged are {getattr(forged, field)}" in caught.value.message


def test_forged_reward_of_an_evaluation_passes_audit_and_is_named_here(
    copy: RecordedRun, call: Call, recorded: RecordedRun
) -> None:
    with Tamper(copy) as log:
        name = damage.forge_evaluation(log)
    bus = copy.open()
    assert audit(bus, copy.topics, copy.store).holds
    bus.close()
    code, out, err = call("replay", str(copy.directory), "--rewards")
    assert code == 6
    (line,) = out.splitlines()
    assert line.startswith(name) and "DIFFERS: its reward is" in line
    assert "the reward's code is another one here (dddddddddddd) than" in err
    assert f"error: {name}: its reward is" in err
    code, out, _ = call("replay", str(recorded.directory), "--rewards", "--random", "5")
    assert (code, out.count("equal")) == (0, 5)


def test_prompt_that_is_not_that_of_its_row_is_named(recorded: RecordedRun) -> None:
    with Tamper(recorded) as log:
        trajectories = _logged(log)[:3]

    def prompt(call: PromptCall) -> TaskEvent:
        other = call.request == trajectories[1].trajectory
        return PromptReady(request=call.request, text="5 6 8" if other else "5 6 7", episode=False)

    found = _again(trajectories, InlineTasks(reward=reward_by_text, prompt=prompt))
    (wrong,) = [one for one in found if not one.equal]
    assert wrong.trajectory == trajectories[1].trajectory
    with pytest.raises(ReplayDiverged, match="its prompt is not that of row") as diverged:
        raise_if_different(wrong)
    assert diverged.value.exit_code == 6


@pytest.mark.parametrize(
    ("answer", "difference", "not_compared"),
    [
        (lambda call: failed(call, "KeyError", "'x'"), "it has no reward (KeyError: 'x')", ""),
        (lambda call: failed(call, "TimedOut", "after 1 s"), "", "TimedOut: after 1 s"),
    ],
)
def test_reward_that_fails_now_differs_and_one_that_takes_too_long_is_not_compared(
    recorded: RecordedRun,
    answer: Callable[[RewardCall], TaskFailed],
    difference: str,
    not_compared: str,
) -> None:
    with Tamper(recorded) as log:
        one = next(one for one in _logged(log) if one.reward is not None)
    (found,) = _again([one], InlineTasks(reward=answer))
    assert (found.difference, found.not_compared) == (difference, not_compared)
    assert not found.equal


@pytest.fixture
def turns(tmp_path: Path) -> list[Trajectory]:
    """Trajectories of three turns of the model, each answered by a tool."""
    config = make_config(run__steps=2, run__name="turns", evaluation__prompts=0)
    with Cluster(tmp_path / "run", config, tasks=lambda: episode_tasks(3)) as cluster:
        cluster.run()
    with Tamper(RecordedRun(directory=tmp_path / "run", run="turns")) as log:
        assert log.facts(TrajectoriesLogged)
        return _logged(log)


def test_environment_is_told_every_turn_and_answers_as_it_did(turns: list[Trajectory]) -> None:
    tasks = episode_tasks(3)
    found = _again(turns, tasks)
    assert [one for one in found if not one.equal] == []
    told = [one.turn.text for one in tasks.seen if isinstance(one, EnvStep)]
    said = [
        ids
        for one in turns
        for kind, ids in turns_of(one.segments, one.token_ids)
        if kind == "model"
    ]
    assert sorted(told) == sorted(" ".join(map(str, ids)) for ids in said)


def test_environment_that_answers_otherwise_is_named(turns: list[Trajectory]) -> None:
    tasks = episode_tasks(3)
    tasks.step = lambda call: EnvObserved(
        request=call.request, text="8 8", done=False, tool="calc", ok=True
    )
    found = _again(turns[:2], tasks)
    assert {one.difference for one in found} == {"its environment answers otherwise"}


def test_an_agents_trajectory_is_scored_by_what_it_was_answered_last(recorded: RecordedRun) -> None:
    with Tamper(recorded) as log:
        found = branched(next(one for one in _logged(log) if one.reward is not None))
    tasks = InlineTasks(reward=reward_by_text)
    (again,) = _again([found], tasks)
    (asked,) = tasks.seen
    assert isinstance(asked, RewardCall)
    last = found.meta.calls[-1]
    assert asked.text.split() == [str(one) for one in found.token_ids[last.start : last.end]]
    assert len(asked.turns) == 6
    (again,) = _again([replace(found, reward=77.0)], InlineTasks(reward=reward_by_text))
    assert "recorded is 77.0" in again.difference


def by_length(call: RewardCall) -> Rewarded:
    return Rewarded(request=call.request, reward=float(len(call.text)), raw=0.5, parts={})


def test_an_agents_answer_is_scored_again_and_its_own_reward_is_not(recorded: RecordedRun) -> None:
    with Tamper(recorded) as log:
        found = branched(next(one for one in _logged(log) if one.reward is not None))
    given = {"agent_answer": "as long as its reward", "reward_raw": 0.5, "reward_parts": {}}
    meta = msgspec.structs.replace(found.meta, **given)
    tasks = InlineTasks(reward=by_length)
    (again,) = _again([replace(found, reward=21.0, meta=meta)], tasks)
    assert again.equal, again
    (again,) = _again([replace(found, reward=22.0, meta=meta)], tasks)
    assert again.difference == "its reward is 21.0, recorded is 22.0"
    meta = msgspec.structs.replace(found.meta, rewarded_by="agent")
    asked = len(tasks.seen)
    (again,) = _again([replace(found, reward=22.0, meta=meta)], tasks)
    assert again.not_compared == "its agent gave the reward"
    assert len(tasks.seen) == asked

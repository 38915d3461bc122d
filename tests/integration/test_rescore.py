"""Texts scored again: with the run's own reward nothing changes, and a forged reward is named; with
another reward the outcomes and advantage signs that differ are exactly those listed.

Method: recorded runs whose tasks answer in process; other rewards are other functions of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.analysis.rescore import Rescored, rescore
from dora_pipe.audit.auditor import audit
from dora_pipe.config import model
from dora_pipe.config.load import dump_toml
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    GroupCall,
    GroupRewarded,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    TaskEvent,
    TaskFailed,
)
from dora_pipe.producers.worker.ports import TaskPort
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.trajectory import Trajectory, turns_of
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import canonical, sha256_hex
from dora_pipe.sim.parts import Numbers
from tests.support import damage
from tests.support.branched_run import branched
from tests.support.cluster import Cluster, make_config, reward_by_text
from tests.support.command_line import Call, caller
from tests.support.inline_tasks import InlineTasks, episode_tasks, failed, ranked
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Tamper
from tests.support.task_again import PoolTasks, ask_here
from tests.support.worker import VirtualClock

GROUP = '[{use = "exact"}, {use = "judge:%s", group = true}]'
scored: list[RewardCall] = []
"""What the tasks of a test were asked for."""


def inverted(call: RewardCall) -> TaskEvent:
    reward = reward_by_text(call)
    if isinstance(reward, Rewarded):
        return Rewarded(request=call.request, reward=1.0 - reward.reward, raw=None, parts={"no": 1})
    return reward


def busy(call: RewardCall) -> TaskEvent:
    if sum(map(ord, call.request)) % 4 == 0:
        return TaskFailed(request=call.request, error="Retry", message="the judge is full")
    return inverted(call)


def backwards(call: GroupCall) -> TaskEvent:
    rewards = tuple(map(float, reversed(range(len(call.completions)))))
    return GroupRewarded(
        request=call.request, rewards=rewards, parts=tuple({"place": reward} for reward in rewards)
    )


def busy_groups(call: GroupCall) -> TaskEvent:
    if sum(map(ord, call.request)) % 3 == 0:
        return TaskFailed(request=call.request, error="Retry", message="the judge is full")
    return backwards(call)


def broken(call: GroupCall) -> TaskEvent:
    return TaskFailed(request=call.request, error="ValueError", message="no order among them")


def coarse(call: RewardCall) -> TaskEvent:
    reward = float(len(call.completion.text) % 7 == 0)
    return Rewarded(request=call.request, reward=reward, raw=None, parts={})


ALONE: dict[str, Callable[[RewardCall], TaskEvent]] = {
    "new:inverted": inverted,
    "new:busy": busy,
    "new:coarse": coarse,
}
TOGETHER: dict[str, Callable[[GroupCall], TaskEvent]] = {
    "judge:rank": ranked,
    "judge:backwards": backwards,
    "judge:busy": busy_groups,
    "judge:broken": broken,
}


class _Facts:
    single_turn = True

    def __init__(self, task: model.Task) -> None:
        uses = [reward.use for reward in task.rewards]
        self.scores_groups = any(reward.group for reward in task.rewards)
        self.reward_digest = sha256_hex(canonical([str(task.reward), *uses]))


class _Pool(PoolTasks):
    def __init__(self, task: model.Task) -> None:
        use = next((reward.use for reward in task.rewards if reward.group), "judge:rank")
        super().__init__(reward=self._score, group=TOGETHER[use])
        self._task = task

    def _score(self, call: RewardCall) -> TaskEvent:
        scored.append(call)
        return ALONE.get(str(self._task.reward), reward_by_text)(call)

    def wait(self) -> _Facts:
        return _Facts(self._task)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    ask_here(monkeypatch, _Pool)
    scored.clear()
    return caller(monkeypatch, capsys)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    config = make_config(
        run__name="together",
        run__steps=3,
        task__reward=[{"use": "exact"}, {"use": "judge:rank", "group": True}],
        rollout__min_valid_trajectories=3,
    )
    directory = tmp_path_factory.mktemp("together") / "together"
    with Cluster(directory, config) as cluster:
        cluster.run()
    (directory / "config.toml").write_text(dump_toml(config))
    return RecordedRun(directory=directory, run="together")


def rescored(call: Call, run: RecordedRun, *words: object) -> dict[str, Any]:
    code, out, err = call("rescore", run.directory, "--json", *words)
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def lines(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = map(json.loads, Path(result["file"]).read_text().splitlines())
    return {row["trajectory"]: row for row in rows}


def assert_nothing_differs(result: dict[str, Any]) -> None:
    assert (result["differ"], result["outcomes"], result["signs"]) == ([], [], [])
    assert (result["first"], result["left_out"], result["differences"]) == (None, 0, {})
    assert result["old"] == result["new"] is not None


def test_the_runs_own_reward_changes_nothing(copy: RecordedRun, call: Call) -> None:
    before = copy.log.read_bytes()
    result = rescored(call, copy)
    assert_nothing_differs(result)
    assert result["trajectories"] > 200
    assert Path(result["file"]) == copy.directory / "rescored" / "own.jsonl"
    code, out, _ = call("rescore", copy.directory)
    assert code == 0
    assert re.search(r"compared +\d+ of 239 trajectories as recorded", out)
    assert "equal for every group" in out
    assert copy.log.read_bytes() == before


def test_a_groups_own_rewards_change_nothing(together: RecordedRun, call: Call) -> None:
    result = rescored(call, together)
    assert_nothing_differs(result)
    assert result["new"] > 1.0, "the mean includes the places in the group"


def test_another_reward_lists_exactly_the_outcomes_and_signs_that_differ(
    call: Call, tmp_path: Path
) -> None:
    config = make_config(run__name="filtered", run__steps=3, rollout__filter_zero_advantage=True)
    run = RecordedRun(directory=tmp_path / "filtered", run="filtered")
    with Cluster(run.directory, config) as cluster:
        cluster.run()
    (run.directory / "config.toml").write_text(dump_toml(config))
    result = rescored(call, run, "--reward", "new:coarse")
    new = {name: row["reward"] for name, row in lines(result).items()}
    signs, outcomes = set[str](), set[str]()
    with closing(run.open()) as bus, closing(read_catalogue(bus, run.topics)) as tables:
        rows = tables.query(
            """select group_id, g.outcome, list(trajectory_id), list(t.reward)
            from groups g join trajectories t using (group_id)
            where g.outcome in ('trained', 'filtered') and t.outcome is null group by all"""
        )
    for group, outcome, names, rewards in rows:
        now = [new[name] for name in names]
        valid = [entry for entry in now if entry is not None]
        differs = len(set(valid)) > 1 and outcome == "filtered"
        if differs or (outcome == "trained" and len(set(valid)) == 1):
            outcomes.add(group)
        if outcome == "trained":
            earlier_rewards = [reward for reward in rewards if reward is not None]
            means = sum(earlier_rewards) / len(earlier_rewards), sum(valid) / len(valid)
            for name, before, after in zip(names, rewards, now, strict=True):
                both = [
                    0 if reward is None else (reward > mean + 1e-9) - (reward < mean - 1e-9)
                    for reward, mean in zip((before, after), means, strict=True)
                ]
                if both[0] != both[1]:
                    signs.add(name)
    assert set(result["signs"]) == signs != set()
    changed = {row["group"] for row in result["outcomes"]}
    assert changed == outcomes != set()
    assert result["first"] == 0


def test_a_forged_reward_that_audit_cannot_see_is_named(
    copy: RecordedRun, call: Call, recorded: RecordedRun
) -> None:
    with Tamper(copy) as log:
        name = damage.forge_evaluation(log)
    with closing(copy.open()) as bus:
        assert audit(bus, copy.topics, copy.store).holds
    code, out, err = call("rescore", copy.directory)
    assert code == 6
    assert f"{name}  DIFFERS: its reward is" in out
    assert f"first {name}: its reward is" in err
    assert "the reward's code differs: " in err


def test_lost_answers_are_named_and_left_out(copy: RecordedRun, call: Call) -> None:
    code, _, err = call("rescore", copy.directory, "--reward", "new:busy")
    assert code == 0
    assert "Retry: the judge is full" in err
    assert "groups are left out: not all their trajectories are scored" in err


def test_a_group_is_compared_by_its_trajectories_rewards_within_it(
    together: RecordedRun, call: Call
) -> None:
    result = rescored(call, together, "--reward", GROUP % "backwards")
    rows = lines(result)
    shown = [name for name, row in rows.items() if "place" in row.get("parts", {})]
    assert 0 < len(shown) < len(rows), "a trajectory without a reward of its own is not shown"
    for group in {group_of(name) for name in shown}:
        names = sorted(name for name in shown if group_of(name) == group)
        places = [rows[name]["parts"]["place"] for name in names]
        assert places == [float(index) for index in reversed(range(len(names)))]
    assert result["old"] == pytest.approx(result["new"]), "the same places in another order"
    assert result["signs"] and result["first"] == 0
    alone = rescored(call, together, "--reward", "exact")
    assert 0.0 <= alone["new"] <= 1.0 < alone["old"]
    none = rescored(call, together, "--reward", GROUP % "broken")
    trained = [row for row in none["outcomes"] if row["old"] == "trained"]
    assert len(trained) == 12
    assert {row["new"] for row in trained} == {"failed"}
    lost = rescored(call, together, "--reward", GROUP % "busy")
    assert lost["left_out"] > 0


def test_a_reward_of_a_task_that_is_not_there_is_refused(recorded: RecordedRun, call: Call) -> None:
    code, _, err = call("rescore", recorded.directory, "--reward", "maths=new:inverted")
    assert code == 2
    assert "no task 'maths'" in err


@pytest.mark.parametrize("damaging", [damage.remove_trajectory, damage.change_token])
def test_a_damaged_record_is_named_and_the_others_are_scored(
    copy: RecordedRun, call: Call, damaging: Callable[[Tamper], str]
) -> None:
    with Tamper(copy) as log:
        name = damaging(log)
    code, out, err = call("rescore", copy.directory)
    assert code == 5
    assert any(line.startswith(f"{name}: ") for line in err.splitlines()), err
    assert "238 of 238 trajectories as recorded" in out


def logged(run: RecordedRun) -> list[Trajectory]:
    with Tamper(run) as log:
        bound = {(fact.partition, fact.offset): fact for *_, fact in log.logged()}
        rows = [row for row in log.rows("trajectories") if (row.partition, row.offset) in bound]
    return [decode_trajectory(row.value) for row in rows]


def again(trajectories: Iterable[Trajectory], tasks: InlineTasks) -> list[Rescored]:
    port = TaskPort(tasks, Numbers())
    return list(rescore(port, trajectories, clock=VirtualClock(), stopped=lambda ids: True))


@pytest.mark.parametrize(
    ("answer", "difference", "not_compared"),
    [
        (lambda call: failed(call, "KeyError", "'x'"), "it has no reward (KeyError: 'x')", ""),
        (lambda call: failed(call, "TimedOut", "after 1 s"), "", "TimedOut: after 1 s"),
    ],
)
def test_a_reward_that_fails_differs_and_one_that_is_lost_is_not_compared(
    recorded: RecordedRun,
    answer: Callable[[RewardCall], TaskFailed],
    difference: str,
    not_compared: str,
) -> None:
    entry = next(fact for fact in logged(recorded) if fact.reward is not None)
    (rescored,) = again([entry], InlineTasks(reward=answer))
    assert (rescored.difference, rescored.not_compared) == (difference, not_compared)


def test_a_prompt_that_is_not_that_of_its_row_is_named(recorded: RecordedRun) -> None:
    trajectories = logged(recorded)[:3]

    def prompt(call: PromptCall) -> TaskEvent:
        other = call.request == trajectories[1].trajectory
        return PromptReady(request=call.request, text="5 6 8" if other else "5 6 7", episode=False)

    results = again(trajectories, InlineTasks(reward=reward_by_text, prompt=prompt))
    (wrong,) = [entry for entry in results if entry.difference]
    assert wrong.trajectory == trajectories[1].trajectory
    assert "its prompt is not that of row" in wrong.difference


def test_an_environment_receives_every_turn_and_must_answer_as_it_did(tmp_path: Path) -> None:
    config = make_config(run__steps=2, run__name="turns", evaluation__prompts=0)
    with Cluster(tmp_path / "run", config, tasks=lambda: episode_tasks(3)) as cluster:
        cluster.run()
    turns = logged(RecordedRun(directory=tmp_path / "run", run="turns"))
    tasks = episode_tasks(3)
    assert not [
        rescored for rescored in again(turns, tasks) if rescored.difference or rescored.not_compared
    ]
    received = [step.turn.text for step in tasks.seen if isinstance(step, EnvStep)]
    model_turns = [
        ids
        for turn in turns
        for kind, ids in turns_of(turn.segments, turn.token_ids)
        if kind == "model"
    ]
    assert sorted(received) == sorted(" ".join(map(str, ids)) for ids in model_turns)
    tasks = episode_tasks(3)
    tasks.step = lambda call: EnvObserved(
        request=call.request, text="8 8", done=False, tool="calc", ok=True
    )
    results = again(turns[:2], tasks)
    assert {result.difference for result in results} == {"its environment answers differently"}


def test_an_agents_answer_is_scored_and_a_reward_of_its_own_is_not(recorded: RecordedRun) -> None:
    trajectory = branched(next(fact for fact in logged(recorded) if fact.reward is not None))
    tasks = InlineTasks(reward=reward_by_text)
    again([trajectory], tasks)
    (asked,) = tasks.seen
    assert isinstance(asked, RewardCall)
    last = trajectory.meta.calls[-1]
    assert asked.completion.text.split() == [
        str(token_id) for token_id in trajectory.token_ids[last.start : last.end]
    ]
    own = msgspec.structs.replace(trajectory.meta, rewarded_by="agent")
    (result,) = again([replace(trajectory, reward=22.0, meta=own)], tasks)
    assert result.not_compared == "its agent gave the reward"
    assert len(tasks.seen) == 1

"""Another reward asked of all logged texts: nothing differs where it is the run's own; what another
one says is kept beside the log, and the command goes on where it was ended.

Method: the recorded run's task answers in process; other rewards are other functions of the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.audit.line_file import line_of
from dora_pipe.audit.rescored_file import NewReward, RescoredFile
from dora_pipe.config import model
from dora_pipe.producers.tasks.calls import RewardCall, Rewarded, TaskEvent, TaskFailed
from dora_pipe.schemas.wire import sha256_hex
from tests.support.cluster import reward_by_text
from tests.support.command_line import Call, caller
from tests.support.recorded_run import RecordedRun
from tests.support.task_again import PoolTasks, ask_here

Answer = Callable[[RewardCall], TaskEvent]


def inverted(call: RewardCall) -> TaskEvent:
    found = reward_by_text(call)
    if isinstance(found, Rewarded):
        return Rewarded(
            request=call.request, reward=1.0 - found.reward, raw=None, parts={"no": 1.0}
        )
    return found


def busy(call: RewardCall) -> TaskEvent:
    """The judge is away for every fourth answer."""
    if sum(map(ord, call.request)) % 4 == 0:
        return TaskFailed(request=call.request, error="Retry", message="the judge is full")
    return inverted(call)


REWARDS: dict[str, Answer] = {"": reward_by_text, "new:inverted": inverted, "new:busy": busy}
asked: list[RewardCall] = []


class _Facts:
    scores_groups = False
    single_turn = True

    def __init__(self, reward: str) -> None:
        self.reward_digest = sha256_hex(reward.replace("busy", "inverted").encode())


class _Pool(PoolTasks):
    def __init__(self, task: model.Task) -> None:
        super().__init__(reward=self._asked)
        self._reward = task.reward

    def _asked(self, call: RewardCall) -> TaskEvent:
        asked.append(call)
        return REWARDS[self._reward](call)

    def wait(self) -> _Facts:
        return _Facts(self._reward)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command line; task and tokenizer are in process."""
    ask_here(monkeypatch, _Pool)
    asked.clear()
    return caller(monkeypatch, capsys)


def rescored(call: Call, run: RecordedRun, *words: str) -> dict[str, Any]:
    code, out, err = call("rescore", str(run.directory), "--json", *words)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_runs_own_reward_changes_nothing(copy: RecordedRun, call: Call) -> None:
    found = rescored(call, copy)
    assert (found["differ"], found["fates"], found["signs"], found["first"]) == (0, [], 0, None)
    assert found["trajectories"] > 200
    assert found["old"] == found["new"] is not None
    code, out, _ = call("rescore", str(copy.directory))
    assert code == 0
    assert "every one has the fate that it had" in out
    assert "0 of" in out


def test_another_reward_is_kept_beside_the_log_and_says_what_it_would_have_changed(
    copy: RecordedRun, call: Call
) -> None:
    before = copy.log.read_bytes()
    found = rescored(call, copy, "--reward", "new:inverted")
    folder = Path(found["folder"])
    assert folder.parent == copy.directory / "rescored"
    assert folder.name == found["reward_digest"][:12]
    lines = (folder / "rewards.jsonl").read_text().splitlines()
    assert len(lines) == found["asked"] == len({json.loads(one)["trajectory"] for one in lines})
    assert copy.log.read_bytes() == before
    assert found["differ"] > 0
    assert found["signs"] > 0
    assert found["first"] == min(one["at"] for one in found["steps"] if one["signs"])
    assert found["new"] == pytest.approx(1.0 - found["old"])
    assert len(found["examples"]) == 20
    code, out, _ = call("rescore", str(copy.directory), "--reward", "new:inverted")
    assert code == 0
    assert "0 texts now" in out
    assert "other signs" in out


def test_the_command_goes_on_where_it_was_ended(copy: RecordedRun, call: Call) -> None:
    whole = rescored(call, copy, "--reward", "new:inverted")
    file = Path(whole["folder"]) / "rewards.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:10]) + lines[10][:9])
    asked.clear()
    again = rescored(call, copy, "--reward", "new:inverted")
    assert again["asked"] == whole["asked"] - 10
    assert sorted(file.read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert {**again, "asked": 0} == {**whole, "asked": 0}


def test_what_infrastructure_lost_is_named_left_out_and_asked_again(
    copy: RecordedRun, call: Call
) -> None:
    code, out, err = call("rescore", str(copy.directory), "--reward", "new:busy")
    assert code == 0
    assert "Retry: the judge is full" in err
    assert "groups are left out: not all their siblings have been scored" in err
    assert "written to" in out
    again = rescored(call, copy, "--reward", "new:inverted")
    assert 0 < again["asked"] < len(asked)
    assert (again["lost"], again["left_out"]) == ([], 0)


def test_scores_of_another_reward_or_run_are_not_mixed_in(
    copy: RecordedRun, call: Call, tmp_path: Path
) -> None:
    out = str(tmp_path / "scores")
    rescored(call, copy, "--out", out)
    code, _, err = call("rescore", str(copy.directory), "--out", out, "--reward", "new:inverted")
    assert code == 2
    assert "has the scores of another reward" in err
    assert "--out DIR" in err


def test_a_file_that_is_damaged_is_named_with_its_line(
    copy: RecordedRun, call: Call, tmp_path: Path
) -> None:
    found = rescored(call, copy, "--out", str(tmp_path))
    file = Path(found["folder"]) / "rewards.jsonl"
    file.write_bytes(b"{}\n" + file.read_bytes())
    code, _, err = call("rescore", str(copy.directory), "--out", str(tmp_path))
    assert code == 2
    assert "rewards.jsonl, line 1:" in err


def test_a_task_that_the_run_does_not_have_is_named(copy: RecordedRun, call: Call) -> None:
    code, _, err = call("rescore", str(copy.directory), "--reward", "maths=new:inverted")
    assert code == 2
    assert "no task 'maths'" in err


def test_a_line_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = RescoredFile(tmp_path)
    one = NewReward(trajectory="g0000000001-000", reward=None, error="ValueError: no")
    file.rewards.write_bytes(line_of(one))
    with file.append(file.rewards) as lines:
        lines.write(line_of(one))
    assert file.rewards.read_bytes() == line_of(one) * 2

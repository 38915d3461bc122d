"""Rewards of groups asked of all logged texts: the run's own changes nothing, another one is
compared by what siblings then count, and the command goes on where it was ended.

Method: a run whose task scores siblings together; its task answers in process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.audit.rescored_file import RescoredFile
from dora_pipe.audit.rescored_run import counting_rewards
from dora_pipe.config import model
from dora_pipe.config.load import dump_toml
from dora_pipe.launch.run_dir import opened
from dora_pipe.producers.tasks.calls import GroupCall, GroupRewarded, TaskEvent, TaskFailed
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.wire import canonical, sha256_hex
from tests.support.cluster import Cluster, make_config, reward_by_text
from tests.support.command_line import Call, caller
from tests.support.inline_tasks import ranked
from tests.support.task_again import PoolTasks, ask_here

GROUP = '[{use = "exact"}, {use = "judge:%s", group = true}]'
asked: list[GroupCall] = []


def backwards(call: GroupCall) -> TaskEvent:
    rewards = tuple(map(float, reversed(range(len(call.completions)))))
    return GroupRewarded(
        request=call.request, rewards=rewards, parts=tuple({"place": one} for one in rewards)
    )


def busy(call: GroupCall) -> TaskEvent:
    """Every third group is lost."""
    if sum(map(ord, call.request)) % 3 == 0:
        return TaskFailed(request=call.request, error="Retry", message="the judge is full")
    return backwards(call)


def broken(call: GroupCall) -> TaskEvent:
    return TaskFailed(request=call.request, error="ValueError", message="no order among them")


TOGETHER: dict[str, Callable[[GroupCall], TaskEvent]] = {
    "judge:rank": ranked,
    "judge:backwards": backwards,
    "judge:busy": busy,
    "judge:broken": broken,
}


class _Facts:
    def __init__(self, task: model.Task) -> None:
        self.scores_groups = any(one.group for one in task.rewards)
        self.single_turn = True
        said = canonical([one.use.replace("busy", "backwards") for one in task.rewards])
        self.reward_digest = sha256_hex(said)


class _Pool(PoolTasks):
    def __init__(self, task: model.Task) -> None:
        super().__init__(reward=reward_by_text, group=self._asked)
        self._task = task

    def _asked(self, call: GroupCall) -> TaskEvent:
        asked.append(call)
        (use,) = (one.use for one in self._task.rewards if one.group)
        return TOGETHER[use](call)

    def wait(self) -> _Facts:
        return _Facts(self._task)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose answers have a reward of their own and one by their place among the siblings."""
    rewards = [{"use": "exact"}, {"use": "judge:rank", "group": True}]
    config = make_config(
        run__name="together",
        run__steps=3,
        task__rewards=rewards,
        task__answer_column="answer",
        groups__min_valid_siblings=3,
    )
    directory = tmp_path_factory.mktemp("together") / "together"
    with Cluster(directory, config) as cluster:
        cluster.run()
    (directory / "config.toml").write_text(dump_toml(config))
    return directory


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command line; task and tokenizer are in process."""
    ask_here(monkeypatch, _Pool)
    asked.clear()
    return caller(monkeypatch, capsys)


def rescored(call: Call, run: Path, out: Path, *words: str) -> dict[str, Any]:
    code, said, err = call("rescore", run, "--json", "--out", out, *words)
    assert code == 0, err
    found: dict[str, Any] = json.loads(said)
    return found


def lines(out: Path, name: str) -> dict[str, dict[str, Any]]:
    found = map(json.loads, (out / name).read_text().splitlines())
    return {one["trajectory"]: one for one in found}


def test_a_runs_own_rewards_of_groups_change_nothing(run: Path, call: Call, tmp_path: Path) -> None:
    found = rescored(call, run, tmp_path)
    assert (found["differ"], found["fates"], found["signs"], found["first"]) == (0, [], 0, None)
    assert (found["left_out"], found["lost"]) == (0, [])
    assert found["asked_groups"] == len(asked) > 12
    assert found["old"] == found["new"] > 1.0, "the mean has the places among siblings in it"


def test_other_rewards_of_groups_are_compared_by_what_siblings_count_then(
    run: Path, call: Call, tmp_path: Path
) -> None:
    found = rescored(call, run, tmp_path, "--reward", GROUP % "backwards")
    alone, together = lines(tmp_path, "rewards.jsonl"), lines(tmp_path, "groups.jsonl")
    assert 0 < len(together) < len(alone), "whoever has no reward alone is not shown"
    for group in {group_of(name) for name in together}:
        names = sorted(name for name in together if group_of(name) == group)
        for place, name in enumerate(reversed(names)):
            assert together[name]["reward"] == alone[name]["reward"] + place
            assert together[name]["parts"]["place"] == place
    assert found["old"] == pytest.approx(found["new"]), "the same places, dealt out otherwise"
    assert found["differ"] > 0
    assert found["signs"] > 0
    assert found["first"] == 0


def test_a_reward_without_groups_takes_their_place(run: Path, call: Call, tmp_path: Path) -> None:
    found = rescored(call, run, tmp_path, "--reward", "exact")
    assert (found["asked_groups"], asked) == (0, [])
    assert 0.0 <= found["new"] <= 1.0 < found["old"]
    assert not (tmp_path / "groups.jsonl").exists()


def test_groups_that_cannot_be_scored_would_have_failed(
    run: Path, call: Call, tmp_path: Path
) -> None:
    found = rescored(call, run, tmp_path, "--reward", GROUP % "broken")
    trained = [one for one in found["fates"] if one["old"] == "trained"]
    assert len(trained) == 12
    assert {one["new"] for one in trained} == {"failed"}
    assert "ValueError: no order" in next(iter(lines(tmp_path, "groups.jsonl").values()))["error"]


def test_groups_go_on_where_the_command_was_ended(run: Path, call: Call, tmp_path: Path) -> None:
    whole = rescored(call, run, tmp_path, "--reward", GROUP % "backwards")
    file = tmp_path / "groups.jsonl"
    before = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(before[:9]) + before[9][:11])
    kept = {group_of(json.loads(one)["trajectory"]) for one in before[:9]}
    asked.clear()
    again = rescored(call, run, tmp_path, "--reward", GROUP % "backwards")
    assert again["asked"] == 0
    assert (
        again["asked_groups"]
        == len(asked)
        in (
            whole["asked_groups"] - len(kept),
            whole["asked_groups"] - len(kept) + 1,  # one of which siblings were missing
        )
    )
    for figure in ("asked", "asked_groups"):
        again[figure] = whole[figure]
    assert again == whole


def test_groups_that_infrastructure_lost_are_named_and_asked_again(
    run: Path, call: Call, tmp_path: Path
) -> None:
    code, said, err = call("rescore", run, "--out", tmp_path, "--reward", GROUP % "busy")
    assert code == 0
    assert "groups of them together" in said
    assert "Retry: the judge is full" in err
    assert "groups are left out" in err
    first = len(asked)
    asked.clear()
    again = rescored(call, run, tmp_path, "--reward", GROUP % "backwards")
    assert 0 < len(asked) < first
    assert (again["left_out"], again["lost"]) == (0, [])


def test_what_counts_is_read_back_without_the_groups_that_were_lost(
    run: Path, call: Call, tmp_path: Path
) -> None:
    assert call("rescore", run, "--out", tmp_path, "--reward", GROUP % "busy")[0] == 0
    file = RescoredFile(tmp_path)
    with opened(str(run)) as there, closing(there.tables()) as tables:
        found = counting_rewards(file, file.about(), tables)
    scored = {name: one["reward"] for name, one in lines(tmp_path, "groups.jsonl").items()}
    assert {name: found[name].reward for name in scored} == scored
    lost = lines(tmp_path, "rewards.jsonl").keys() - found.keys()
    assert lost
    assert not {group_of(one) for one in lost} & {group_of(one) for one in scored}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ('[{use = "exact"', "--reward"),
        ("{weight = 0.5}", "required field `use`"),
        ('{use = "exact", worth = 1}', "unknown field `worth`"),
    ],
)
def test_an_inline_reward_that_cannot_be_read_is_one_line_and_a_hint(
    run: Path, call: Call, words: str, says: str
) -> None:
    code, _, err = call("rescore", run, "--reward", words)
    assert code == 2
    assert says in err
    assert "docs/rewards.md" in err

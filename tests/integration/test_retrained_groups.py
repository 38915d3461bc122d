"""A retrained run is read as any run: its groups, their rewards as they count there, their fates.

Method: steps 5 to 7 of the recorded run again, once as they were and once otherwise, by the trainer
without torch; what commands and tables say is held against the source's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.audit.describe import describe
from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.catalogue import follower
from dora_pipe.catalogue.database import logged_records
from dora_pipe.catalogue.follower import LogFollower
from dora_pipe.cli.why import Asked, answer
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.core.errors import PolicyError, UsageError
from dora_pipe.launch.run_dir import opened
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.observe.web.overview import overview
from dora_pipe.observe.web.view import view_of
from tests.support.command_line import caller
from tests.support.recorded_run import RecordedRun
from tests.support.retrained import NAME, commits, retrained

AGAIN, OTHER = "again", "other"
FIRST, LAST = 5, 7

ROWS = """
    select group_id, t.trajectory_id, g.version, g.row, g.fate, g.step, g.staleness, t.tokens,
           t.reward, t.partition, t.record_offset, r.standing, r.sha256
    from groups g join trajectories t using (group_id) join records r using (trajectory_id)
    where r.standing = 'bound' and fate = 'trained' and step between 5 and 7 order by all"""

STEPS = """
    select step, trajectories, valid, reward, reward_raw, reward_low, reward_high, tokens,
           tokens_p50, staleness_mean, bound, late from steps where step between 5 and 7
    order by step"""


def asked(root: Path, name: str, sql: str) -> Sequence[tuple[Any, ...]]:
    with opened(name, root) as run, closing(run.tables()) as tables:
        return tables.query(sql)


@pytest.fixture(scope="module")
def change(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> BatchChange:
    """Of step 5: a group is left out, of another a trajectory; a third has another reward."""
    root = tmp_path_factory.mktemp("source")
    recorded.copy(root / NAME)
    left_out, other, scored, *_ = commits(root, NAME)[FIRST].groups
    dropped = other.trajectories[0].trajectory
    rewards = {scored.trajectories[0].trajectory: 7.5}
    return BatchChange(without=frozenset({left_out.group, dropped}), rewards=rewards)


@pytest.fixture(scope="module")
def root(
    recorded: RecordedRun, change: BatchChange, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The source, its steps as they were, and otherwise."""
    root = tmp_path_factory.mktemp("runs")
    recorded.copy(root / NAME)
    retrained(root, AGAIN)
    retrained(root, OTHER, change=change)
    return root


def test_its_tables_have_the_groups_records_and_steps_of_the_source(root: Path) -> None:
    rows = asked(root, AGAIN, ROWS)
    assert len(rows) > 20
    assert rows == asked(root, NAME, ROWS)
    assert asked(root, AGAIN, STEPS) == asked(root, NAME, STEPS)
    assert asked(root, AGAIN, "select count(*) from groups where step is null") == [(0,)]
    assert asked(root, AGAIN, "select retrained_from, retrained_first, retrained_last from runs")[
        0
    ] == (NAME, FIRST, LAST)


def test_rewards_count_as_they_do_in_this_run_and_what_is_left_out_is_not_trained(
    root: Path, change: BatchChange
) -> None:
    ((scored, reward),) = change.rewards.items()
    (dropped,) = (one for one in change.without if "-" in one)
    (group,) = (one for one in change.without if "-" not in one)
    found = dict(asked(root, OTHER, "select trajectory_id, reward from trajectories"))
    assert (found[scored], found[dropped]) == (reward, None)
    fate = f"select fate, step, why from groups where group_id = '{group}'"
    assert asked(root, OTHER, fate) == [("filtered", None, "left out of step 5")]
    means = "select step, avg(t.reward) from trajectories t join groups using (group_id)"
    own = asked(root, OTHER, f"{means} where fate = 'trained' group by step order by step")
    assert dict(asked(root, OTHER, "select step, reward from steps")) == pytest.approx(dict(own))
    (before,) = asked(
        root, NAME, f"select reward from trajectories where trajectory_id = '{scored}'"
    )
    assert before != (reward,)


def test_what_becomes_of_a_run_in_numbers_is_told_of_its_own_steps(root: Path) -> None:
    stats = RunStats(AGAIN)
    with opened(AGAIN, root) as run, closing(stats.follow(run.bus, run.topics)) as reader:
        while reader.advance():
            pass
    rewards = asked(root, NAME, STEPS)
    assert [one.reward for one in stats.steps] == [row[3] for row in rewards]
    assert (stats.done, stats.planned, stats.over) == (3, 3, True)
    assert stats.fates == {"trained": sum(len(one.groups) for one in commits(root, AGAIN))}
    assert not stats.trajectories, "it has sampled none"


def test_a_run_is_read_no_further_than_its_batches_need(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "PIECE_BYTES", 2048)
    stats = RunStats(AGAIN)
    with opened(AGAIN, root) as run, closing(stats.follow(run.bus, run.topics)) as reader:
        while reader.advance():
            pass
        assert reader._lender is not None
        source = reader._lender._follower
        assert isinstance(source, LogFollower)
        assert source.share < 1.0
    assert stats.done == 3


@pytest.mark.parametrize("name", [AGAIN, OTHER])
def test_a_step_a_group_and_a_trajectory_say_where_they_come_from_and_what_counts_here(
    root: Path, change: BatchChange, name: str
) -> None:
    group = commits(root, name)[0].groups[2]
    with opened(name, root) as run:
        step = describe(run.bus, run.topics, run.policies, "5")
        found = describe(run.bus, run.topics, run.policies, group.group)
        one = describe(run.bus, run.topics, run.policies, group.trajectories[0].trajectory)
    assert all(row["rewards"] for row in step["groups"])
    assert (found["fate"]["fate"], found["fate"]["step"]) == ("trained", 5)
    assert found["group"]["sampled by run"] == NAME
    assert found["trace"] and one["records"][0]["found"] == "as logged"
    reward = {} if name == AGAIN else {"reward": 7.5}
    assert one.get("counts here", {}) == reward


def test_runs_are_compared_by_the_numbers_of_their_steps(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = caller(monkeypatch, capsys)("diff", NAME, AGAIN, "--runs", root)
    assert code == 0
    assert "batches        the same as far as both go" in out
    assert "the other has no groups of its own: it was trained again" in out
    assert "workers" not in out, "who samples is no question of a run that borrows"
    code, out, _ = caller(monkeypatch, capsys)("diff", NAME, OTHER, "--runs", root)
    assert "batches        the same before step 5" in out


def test_its_first_page_has_its_rewards_and_no_times_of_another_run(root: Path) -> None:
    with opened(AGAIN, root) as run, closing(run.tables()) as tables:
        found = overview(view_of(tables, AGAIN))
    assert found["reward"]["step"] == [5, 6, 7]
    assert found["reward"]["valid"] == pytest.approx(
        [row[3] for row in asked(root, NAME, STEPS)], 1e-3
    )
    assert found["times"]["rows"] == []
    assert found["totals"]["tokens_per_s"] is None
    assert all(at >= 0 for at in found["utilisation"]["at"])
    assert found["run"]["retrained"] == {"run": NAME, "first": FIRST, "last": LAST}


def test_nobody_waits_there_but_its_trainer(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = {"summary": False, "slots": False, "tree": False, "as_json": False}
    with opened(AGAIN, root) as run:
        answer(run, Asked(at="", step=6, **plain))
        assert "step 6: the trainer" in capsys.readouterr().out
        with pytest.raises(UsageError, match="nobody but its trainer has waited"):
            answer(run, Asked(at="3", step=None, **plain))
        with pytest.raises(UsageError, match="step 9 was not taken"):
            answer(run, Asked(at="", step=9, **plain))


@pytest.mark.parametrize(
    "words", [("fork", AGAIN, "g0000000001-000"), ("replay", AGAIN, "--random", 1)]
)
def test_what_asks_for_rollouts_leads_to_the_run_that_has_them(
    root: Path,
    words: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = caller(monkeypatch, capsys)(*words, "--runs", root)
    assert code == 2
    assert f"were sampled by run {NAME}" in err
    assert f"hint: dora-pipe {words[0]} {NAME}" in err


def test_a_change_that_is_gone_is_one_clear_line(
    root: Path, recorded: RecordedRun, change: BatchChange, tmp_path: Path
) -> None:
    recorded.copy(tmp_path / NAME)
    retrained(tmp_path, OTHER, change=change)
    (file,) = (tmp_path / OTHER / "policies" / "change").iterdir()
    file.unlink()
    with pytest.raises(PolicyError, match="no change file"):
        asked(tmp_path, OTHER, STEPS)


def test_records_that_its_log_shows_and_no_batch_has_are_said_to_be_the_sources(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(AGAIN, root) as run, closing(run.tables()) as tables:
        own = len(logged_records(tables, "true"))
    with opened(NAME, root) as run:
        whole = sum(1 for _ in records_of(run.bus, ends_of(run.bus, run.topics.trajectories)))
    call = caller(monkeypatch, capsys)
    code, _, said = call("export", "parquet", AGAIN, tmp_path / "a", "--runs", root)
    assert code == 0
    assert own > 0
    assert f"{whole - own} other records of that log are of run {NAME} alone" in said
    assert "left out" not in said
    code, _, said = call("export", "parquet", NAME, tmp_path / "b", "--runs", root)
    assert code == 0
    assert "other records" not in said


@pytest.mark.parametrize("wanted", ["2", "g0000000001", "g0000000001-000"])
def test_what_only_the_source_has_leads_there(root: Path, wanted: str) -> None:
    with opened(AGAIN, root) as run, pytest.raises(UsageError) as refused:
        describe(run.bus, run.topics, run.policies, wanted)
    assert refused.value.message.endswith(
        f", which has steps {FIRST} to {LAST} of run {NAME} again"
    )
    assert refused.value.hint == f"dora-pipe show {NAME} {wanted}"

"""Steps trained again from a log: the source's weights where nothing is otherwise, an honest run of
its own where something is.

Method: steps 5 to 7 of the recorded run, by the trainer without torch, in this process.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from dora_pipe.audit.line_file import line_of
from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.audit.rescored_file import About, NewReward, RescoredFile
from dora_pipe.bus.port import Append
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.cli.retrain import Setting, change_of_setting
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.consumers.trainer import effect_handlers
from dora_pipe.consumers.trainer.change_file import named_rows, weighed_rows
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.core.errors import ConfigError, DoraError, InvariantBroken, UsageError
from dora_pipe.launch.run_dir import opened
from dora_pipe.observe.lineage import policy_after
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode, sha256_hex
from tests.support.command_line import caller
from tests.support.recorded_run import RecordedRun
from tests.support.retrained import (
    AGAIN,
    NAME,
    audited,
    broken_off,
    commits,
    planned,
    replayed,
    retrained,
    runs_with_again,
)

FIRST, LAST = 5, 7


def everything(path: Path) -> str:
    """A digest of every record of a log."""
    found = b""
    with closing(SqliteBus(path)) as bus:
        for topic in bus.topics():
            for record in records_of(bus, ends_of(bus, topic)):
                found += sha256_hex(f"{record.at}{record.offset}".encode(), record.value).encode()
    return sha256_hex(found)


@pytest.fixture(scope="module")
def root(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run, and steps of it trained again with nothing otherwise."""
    return runs_with_again(tmp_path_factory.mktemp("runs"), recorded)


@pytest.fixture
def runs(root: Path, tmp_path: Path) -> Path:
    """A copy of both, to be damaged."""
    return shutil.copytree(root, tmp_path / "runs")


def row_of(root: Path, name: str, commit: StepCommitted, trajectory: str) -> dict[str, object]:
    with opened(name, root) as run:
        path = run.policies.verify_blob("contributions", commit.contributions.sha256)
        rows = {one["trajectory"]: one for one in read_contributions(path)}
    return rows[trajectory]


def test_unchanged_steps_give_the_weights_of_the_source_and_its_contributions(root: Path) -> None:
    theirs = commits(root, NAME)[FIRST : LAST + 1]
    ours = commits(root, AGAIN)
    assert [one.step for one in ours] == [5, 6, 7]
    for one, other in zip(ours, theirs, strict=True):
        assert one.digest_after == other.digest_after
        assert one.groups == other.groups
        assert (one.settings, one.parts) == (other.settings, other.parts)
        assert one.contributions == other.contributions
        assert one.figures == other.figures


def test_such_a_run_holds_and_can_be_replayed_from_its_own_store(root: Path) -> None:
    report = audited(root, AGAIN)
    assert report.holds, [one.line for one in report.violations]
    assert (report.source, report.first, report.last, report.steps) == (NAME, FIRST, LAST, 3)
    assert all(line.looked for line in report.checks)
    assert [line.equal for line in replayed(root, AGAIN, FIRST, LAST + 1)] == [True] * 3


def test_the_sources_log_is_never_written_to(
    recorded: RecordedRun, root: Path, tmp_path: Path
) -> None:
    assert everything(root / NAME / "log.sqlite") == everything(recorded.log)
    with opened(AGAIN, root) as run, closing(run.bus.writer()) as writer:
        trajectories = run.topics.trajectories
        assert run.bus.partitions(trajectories) == 3
        with pytest.raises(DoraError, match="lent"):
            run.bus.trim(next(iter(ends_of(run.bus, trajectories))), 1)
        writer.append([Append(topic=Topics(AGAIN).metrics, value=b"{}")])
    assert everything(root / NAME / "log.sqlite") == everything(recorded.log)


def test_rows_that_do_not_count_other_rewards_and_weights_make_other_steps_that_hold(
    runs: Path,
) -> None:
    before = commits(runs, AGAIN)
    group, other = before[0].groups[0], before[0].groups[1]
    dropped = other.trajectories[0].trajectory
    scored, weighed = (one.trajectory for one in other.trajectories[1:3])
    change = BatchChange(
        without=frozenset({group.group, dropped}), rewards={scored: 7.5}, weights={weighed: 0.5}
    )
    found = retrained(runs, "other", change=change)
    assert found[0].digest_after != before[0].digest_after
    assert found[0].groups == before[0].groups
    report = audited(runs, "other")
    assert report.holds, [one.line for one in report.violations]
    assert (report.without, report.rewards, report.weights) == (2, 1, 1)
    assert row_of(runs, "other", found[0], dropped)["advantage"] is None
    assert row_of(runs, "other", found[0], scored)["reward"] == 7.5
    with pytest.raises(KeyError):
        row_of(runs, "other", found[0], group.trajectories[0].trajectory)
    assert [line.equal for line in replayed(runs, "other", FIRST, LAST + 1)] == [True] * 3


def test_settings_are_those_of_the_steps_with_the_others_laid_over_them(runs: Path) -> None:
    found = retrained(runs, "topr", last=5, overrides=("objective.kind=topr",))
    assert found[0].settings["objective.kind"] == "topr"
    assert found[0].digest_after != commits(runs, AGAIN)[0].digest_after
    report = audited(runs, "topr")
    assert report.holds, [one.line for one in report.violations]
    assert report.settings == {"objective.kind": "topr"}


def test_the_first_steps_begin_at_the_model_itself(runs: Path) -> None:
    found = retrained(runs, "begin", first=0, last=1)
    assert [one.digest_after for one in found] == [
        one.digest_after for one in commits(runs, NAME)[:2]
    ]
    report = audited(runs, "begin")
    assert report.holds, [one.line for one in report.violations]


def test_what_was_broken_off_goes_on_where_it_was(runs: Path) -> None:
    assert not broken_off(runs, "late", 1)
    begun = [one.step for one in commits(runs, "late")]
    assert begun and begun[-1] < LAST
    found = retrained(runs, "late")
    assert [one.step for one in found] == [5, 6, 7]
    assert found[-1].digest_after == commits(runs, AGAIN)[-1].digest_after
    report = audited(runs, "late")
    assert report.holds, [one.line for one in report.violations]
    assert report.finished


def test_a_directory_without_a_first_record_is_begun_again(runs: Path) -> None:
    planned(runs, "late")
    (runs / "late" / "log.sqlite").unlink()
    for left in ("log.sqlite-wal", "log.sqlite-shm"):
        (runs / "late" / left).unlink(missing_ok=True)
    found = retrained(runs, "late", last=5)
    assert found[-1].digest_after == commits(runs, AGAIN)[0].digest_after


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"first": 14, "last": 14}, "steps 14 to 14 cannot be trained again"),
        ({"first": 7, "last": 6}, "steps 7 to 6 cannot be trained again"),
        ({"name": NAME}, "needs a name of its own"),
        ({"change": BatchChange(without=frozenset({"g9999999999"}))}, "in none of the steps"),
        ({"change": BatchChange(weights={"g9999999999-000": 0.5})}, "in none of the steps"),
        ({"source": AGAIN}, "has no trajectories of its own"),
        ({"name": AGAIN, "last": 6}, "exists, with another last step"),
        ({"name": AGAIN, "overrides": ("objective.kl=0.5",)}, "exists, with other settings"),
    ],
)
def test_what_cannot_be_trained_again_is_refused_by_name(
    root: Path, how: dict[str, object], words: str
) -> None:
    asked: dict[str, object] = {"name": "new", **how}
    with pytest.raises(UsageError, match=words):
        planned(root, **asked)  # type: ignore[arg-type]
    assert not (root / "new").exists()


def test_a_key_that_is_no_setting_of_a_step_is_refused_by_name(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"sampling.max_tokens is no setting of a training step"):
        planned(root, "new", overrides=("sampling.max_tokens=8",))
    assert not (root / "new").exists()


def test_a_missing_source_is_one_clear_line(runs: Path) -> None:
    (runs / NAME).rename(runs / "elsewhere")
    with pytest.raises(UsageError, match="was trained on the log of 'recorded', which is not in"):
        audited(runs, AGAIN)


def test_a_trajectory_that_was_changed_in_the_source_is_found(runs: Path) -> None:
    taken = commits(runs, AGAIN)[1].groups[0].trajectories[0]
    with closing(sqlite3.connect(runs / NAME / "log.sqlite")) as file:
        rows = file.execute("select at, value from records").fetchall()
        at = next(at for at, value in rows if sha256_hex(value) == taken.sha256)
        file.execute("update records set value = cast(value || x'00' as blob) where at = ?", (at,))
        file.commit()
    lines = [one.line for one in audited(runs, AGAIN).violations]
    assert any(line.startswith(f"records {taken.trajectory}") for line in lines), lines
    assert any("batches step 6" in line for line in lines)
    with pytest.raises(InvariantBroken, match="cannot be trained again"):
        retrained(runs, "new")


def test_a_commit_that_says_something_else_is_found(runs: Path) -> None:
    last = commits(runs, AGAIN)[-1]
    forged = msgspec.structs.replace(
        last, settings={**last.settings, "trainer.learning_rate": 1.0}, step=last.step + 1
    )
    with closing(SqliteBus(runs / AGAIN / "log.sqlite")) as bus, closing(bus.writer()) as writer:
        control = Topics(AGAIN).control
        writer.append([Append(topic=control, key=b"trainer", value=encode(forged))])
    lines = [one.line for one in audited(runs, AGAIN).violations]
    assert any("step 8: is committed, but no decision took its batch" in one for one in lines)


def test_a_change_that_is_another_one_is_found(runs: Path) -> None:
    group = commits(runs, AGAIN)[0].groups[0].group
    retrained(runs, "other", last=5, change=BatchChange(without=frozenset({group})))
    (file,) = (runs / "other" / "policies" / "change").iterdir()
    file.write_bytes(file.read_bytes().replace(group.encode(), b"g0000000000"))
    lines = [one.line for one in audited(runs, "other").violations]
    assert any("the change of its batches" in line for line in lines), lines


def test_contributions_that_do_not_follow_from_the_change_are_found(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has trained something else than the run says."""
    taken = commits(runs, AGAIN)[0].groups[0].trajectories[0].trajectory
    monkeypatch.setattr(effect_handlers, "changed", lambda batch, change: batch)
    retrained(runs, "other", last=5, change=BatchChange(rewards={taken: 3.0}))
    lines = [one.line for one in audited(runs, "other").violations]
    assert f"policies {taken}: reward in the contributions of step 5 does not follow" in lines[0]


def test_commands_show_such_a_run_and_do_not_fall_over(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = caller(monkeypatch, capsys)
    where = ("--runs", root)
    for words in (
        ("show", AGAIN),
        ("show", AGAIN, 6),
        ("runs",),
        ("why", AGAIN),
        ("diff", NAME, AGAIN),
        ("audit", AGAIN),
        ("audit", AGAIN, "--json"),
        ("sql", AGAIN, "select step, reward from steps"),
    ):
        code, out, err = call(*words, *where)
        assert code == 0, (words, err)
        assert out
    code, _, err = call("audit", AGAIN, "--follow", *where)
    assert code == 2
    assert "--follow is for rollouts" in err


def test_files_of_rows_may_have_comments_and_bad_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text("# loops\ng0000000001  # all of it\n\ng0000000002-001\n")
    assert named_rows(file) == ["g0000000001", "g0000000002-001"]
    file.write_text("g0000000002-001 0.5\n")
    assert weighed_rows(file) == {"g0000000002-001": 0.5}
    file.write_text("g0000000002-001\n")
    with pytest.raises(UsageError, match="'g0000000002-001' is no trajectory with a weight"):
        weighed_rows(file)
    with pytest.raises(UsageError, match="cannot be read"):
        named_rows(tmp_path / "none")


def scored(runs: Path, rewards: dict[str, float | None], started_ns: int | None = None) -> None:
    """What `rescore` would have written of the recorded run."""
    with opened(NAME, runs) as run:
        started, _ = policy_after(run.bus, run.topics, 0)
    file = RescoredFile(runs / NAME / "rescored" / "ab12cd34ef56")
    at_ns = started.at_ns if started_ns is None else started_ns
    file.begin(About(run=NAME, started_ns=at_ns, reward="r", reward_digest="ab", package="0"))
    with file.append(file.rewards) as lines:
        for name, reward in rewards.items():
            lines.write(line_of(NewReward(trajectory=name, reward=reward)))


def change_by(runs: Path, name: str) -> BatchChange:
    with opened(NAME, runs) as run:
        return change_of_setting(run, Setting(name="new", rescored=name), FIRST, FIRST)


def test_rescored_rewards_take_the_place_of_the_logged_ones(runs: Path) -> None:
    step = commits(runs, NAME)[FIRST]
    names = [one.trajectory for group in step.groups for one in group.trajectories]
    other = {"g9999999999-000": 1.0}
    scored(runs, {**{name: float(at) for at, name in enumerate(names)}, names[3]: None, **other})
    change = change_by(runs, "ab12")
    assert change.without == {names[3]}
    assert change.rewards == {name: float(at) for at, name in enumerate(names) if name != names[3]}
    retrained(runs, "new", last=FIRST, change=change)
    report = audited(runs, "new")
    assert report.holds, [one.line for one in report.violations]
    with pytest.raises(UsageError, match="has no 77"):
        change_by(runs, "77")


def test_scores_that_are_not_whole_or_of_another_run_are_refused(runs: Path) -> None:
    step = commits(runs, NAME)[FIRST]
    names = [one.trajectory for group in step.groups for one in group.trajectories]
    scored(runs, {name: 1.0 for name in names[1:]})
    with pytest.raises(UsageError, match=f"{names[0]} has no score in"):
        change_by(runs, "ab12cd34ef56")
    shutil.rmtree(runs / NAME / "rescored")
    scored(runs, {name: 1.0 for name in names}, started_ns=1)
    with pytest.raises(UsageError, match="the scores of another run of that name"):
        change_by(runs, "ab12cd34ef56")


def test_a_run_that_has_lost_the_name_of_its_source_does_not_pass_for_an_ordinary_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / AGAIN / "retrained-from").unlink()
    code, out, _ = caller(monkeypatch, capsys)("audit", AGAIN, "--json", "--runs", runs)
    assert code == 5
    assert "trained again on the log of recorded, which its directory does not name" in out

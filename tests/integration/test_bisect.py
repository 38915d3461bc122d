"""A group that made a run worse is named: steps are trained again from the log without it.

Method: the recorded run's steps, a trainer of hashes that remembers which rows its weights have
seen, and a probe that is worth less where these are among them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.audit.bisect import Limits, Subject, Trial, Values, Version, search
from dora_pipe.audit.culprits import Explanation
from dora_pipe.audit.measuring import Measuring, look_into
from dora_pipe.audit.probed_file import AboutProbe, ProbedFile
from dora_pipe.audit.repeat_steps import MadeWeights, Planted, StepRepeater
from dora_pipe.bus.port import Bus
from dora_pipe.cli import bisect as command
from dora_pipe.cli import probed_runs
from dora_pipe.consumers.learners.port import Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.core.errors import ReplayDiverged, TaskError
from dora_pipe.schemas.control import StepCommitted
from tests.support.command_line import Call, caller
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.worker import VirtualClock

LIMITS = Limits(draws=32, draws_max=64, after=1, before=1, steps=20, suspects=8)
GOOD, BAD = 2, 13
STEP = 8
"""Its checkpoint is two steps before it, behind step 5."""

Seen = dict[str, frozenset[str]]
"""By weights digest, the groups and trajectories that its steps had."""


class Remembering(SimulatedLearner):
    """Notes what every version has been trained on."""

    def __init__(self, seen: Seen, *, flavour: str = "") -> None:
        super().__init__(flavour=flavour)
        self.seen = seen
        self.trained: list[int] = []

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        before = self.seen.get(self.manifest().digest, frozenset())
        rows = [one for group in batch.groups for one in group.trajectories]
        names = {one.trajectory for one in rows if one.reward is not None}
        result = super().train(batch, settings)
        self.trained.append(batch.step)
        own = before | names | {one.group for one in batch.groups}
        self.seen[self.manifest().digest] = own
        return result


@dataclass
class Probe:
    """Worth 1 for most draws, and less where the weights have seen what is bad."""

    seen: Seen
    bad: frozenset[str]
    asked: list[str] = field(default_factory=list)
    most: int = 10_000
    """Questions after which it is gone."""
    digest: str = "0" * 64
    engine: str = ""
    direction: float | None = None

    def begin(self, folder: Path) -> None:
        """It keeps nothing."""

    def values(self, weights: Path, made: MadeWeights, first: int, last: int) -> Values:
        assert weights.is_file()
        if len(self.asked) >= self.most:
            raise TaskError("the probe is gone")
        self.asked.append(made.of)
        worse = bool(self.bad) and self.bad <= self.seen[made.digest]
        return [float(at % 8 != 0) * (0.25 if worse else 1.0) for at in range(first, last)]


@dataclass
class Stage:
    """A recorded run that is looked into."""

    run: RecordedRun
    bus: Bus
    history: CommitHistory
    commits: Sequence[StepCommitted]
    seen: Seen
    folder: Path

    def repeater(self, learner: SimulatedLearner, planted: Planted | None = None) -> StepRepeater:
        from dora_pipe.store.store import PolicyStore

        return StepRepeater(
            self.bus,
            self.run.topics,
            PolicyStore(self.run.store),
            self.history,
            learner,
            folder=self.folder / "scratch",
            clock=VirtualClock(),
            planted=planted,
        )

    def look(self, probe: Probe, repeater: StepRepeater) -> tuple[int, Explanation | None]:
        """The step that made the first bad version, and what did it."""
        from dora_pipe.store.store import PolicyStore

        store = PolicyStore(self.run.store)

        def weights(subject: Subject) -> tuple[Path, MadeWeights]:
            if isinstance(subject, Trial):
                return repeater.train(subject)
            digest = self.history.digest_of(subject.version)
            return store.weights(digest), MadeWeights(of=subject.words, digest=digest)

        file = ProbedFile(self.folder)
        file.begin(AboutProbe(run="recorded", started_ns=1, probe="mine:probe", digest="d"))
        measuring = Measuring(probe=probe, file=file, weights=weights)
        fall = measuring.run(search(GOOD, BAD, LIMITS))
        if not fall.sure:
            return -1, None
        return fall.last_good, look_into(fall, measuring, repeater, LIMITS, steps=STEPS)

    def group(self, step: int, at: int = 0) -> str:
        return self.commits[step].groups[at].group


@pytest.fixture
def stage(recorded: RecordedRun, tmp_path: Path) -> Iterator[Stage]:
    """The run, and what each of its versions was trained on."""
    with closing(recorded.open()) as bus:
        clock = VirtualClock()
        history = read_history(bus, recorded.topics, clock)
        commits = list(read_commits(bus, recorded.topics, history.notes, clock))
        seen: Seen = {history.digest_of(0): frozenset()}
        for commit in commits:
            names = {row.trajectory for group in commit.groups for row in group.trajectories}
            groups = {group.group for group in commit.groups}
            before = seen[history.digest_of(commit.step)]
            seen[commit.digest_after] = before | names | groups
        yield Stage(recorded, bus, history, commits, seen, tmp_path / "bisect")


def test_the_group_that_made_the_run_worse_is_named(stage: Stage) -> None:
    bad = stage.group(STEP)
    step, found = stage.look(
        Probe(stage.seen, frozenset({bad})), stage.repeater(Remembering(stage.seen))
    )
    assert step == STEP
    assert found is not None
    assert [one.name for one in found.cause] == [bad]
    assert found.steps <= LIMITS.steps
    assert found.proof is not None
    assert found.proof.verdict == "good"
    assert found.proof.before == pytest.approx(0.21875)


def test_a_group_of_the_step_before_is_named_where_the_fall_came_later(stage: Stage) -> None:
    early, late = stage.group(STEP - 1), stage.group(STEP)
    step, found = stage.look(
        Probe(stage.seen, frozenset({early, late})), stage.repeater(Remembering(stage.seen))
    )
    assert step == STEP
    assert found is not None
    assert {one.name for one in found.cause} < {early, late}


def test_it_is_said_where_no_group_explains_the_fall(stage: Stage) -> None:
    """Whatever is left out, the step is as bad: its setting was."""
    learner = Remembering(stage.seen)
    probe = Probe(stage.seen, frozenset())
    after = {stage.history.digest_of(version) for version in range(STEP + 1, STEPS + 1)}
    whole = dict(stage.seen)

    def values(weights: Path, made: MadeWeights, first: int, last: int) -> Values:
        worse = made.digest in after or made.digest not in whole
        return [0.25 if worse else 1.0] * (last - first)

    probe.values = values  # type: ignore[method-assign]
    step, found = stage.look(probe, stage.repeater(learner))
    assert step == STEP
    assert found is not None
    assert (found.cause, found.proof is not None) == ((), True)
    assert command.conclusion(found)[0].startswith("nothing explains the fall: without all")
    changed = command.conclusion(found, ["step 8: trainer.learning_rate 1e-05 -> 0.1"])
    assert changed[0].startswith("no group explains the fall: without all")
    assert "setting may (step 8: trainer.learning_rate 1e-05 -> 0.1)" in changed[-1]


def test_nothing_is_trained_again_where_nothing_fell(stage: Stage) -> None:
    learner = Remembering(stage.seen)
    assert stage.look(Probe(stage.seen, frozenset()), stage.repeater(learner)) == (-1, None)
    assert learner.trained == []


def test_the_way_to_the_first_step_is_trained_once(stage: Stage) -> None:
    learner = Remembering(stage.seen)
    repeater = stage.repeater(learner)
    for name in (stage.group(STEP), stage.group(STEP, 1)):
        repeater.train(Trial(first=STEP, last=STEP + 1, without=frozenset({name})))
    assert learner.trained == [6, 7, STEP, STEP + 1, STEP, STEP + 1]
    assert repeater.led == 2


def test_a_trial_without_nothing_has_the_committed_weights(stage: Stage) -> None:
    repeater = stage.repeater(Remembering(stage.seen))
    weights, made = repeater.train(Trial(first=STEP, last=STEP + 2))
    assert made.digest == stage.history.digest_of(STEP + 3)
    assert weights.is_file()


def test_the_last_trial_is_not_trained_twice(stage: Stage) -> None:
    learner = Remembering(stage.seen)
    repeater = stage.repeater(learner)
    trial = Trial(first=STEP, last=STEP, without=frozenset({stage.group(STEP)}))
    _, made = repeater.train(trial)
    trained = list(learner.trained)
    assert repeater.train(trial)[1] == made
    assert learner.trained == trained


def test_what_leads_there_and_differs_is_no_ground_for_trials(stage: Stage) -> None:
    repeater = stage.repeater(Remembering(stage.seen, flavour="another"))
    with pytest.raises(ReplayDiverged, match="step 6 gives other weights here"):
        repeater.train(Trial(first=STEP, last=STEP))


def test_a_planted_reward_is_in_every_step_from_it_on_and_in_no_other(stage: Stage) -> None:
    row = stage.commits[STEP].groups[0].trajectories[0].trajectory
    planted = Planted(
        first=STEP,
        change=BatchChange(rewards={row: -99.0}),
        settings={"trainer.learning_rate": 0.5},
    )
    repeater = stage.repeater(Remembering(stage.seen), planted)
    rows = {one.trajectory: one for one in repeater.rows(STEP - 1, STEP)}
    assert rows[row].reward == -99.0
    assert rows[row].advantage != 0.0
    _, made = repeater.train(Trial(first=STEP - 1, last=STEP - 1))
    assert made.digest == stage.history.digest_of(STEP)
    _, made = repeater.train(Trial(first=STEP, last=STEP))
    assert made.digest != stage.history.digest_of(STEP + 1)


def test_a_command_that_was_ended_goes_on_and_asks_nothing_twice(stage: Stage) -> None:
    bad = frozenset({stage.group(STEP)})
    whole = Probe(stage.seen, bad)
    step, found = stage.look(whole, stage.repeater(Remembering(stage.seen)))
    for ended in (3, len(whole.asked) - 1):
        stage.folder = stage.folder.with_name(f"ended-{ended}")
        first = Probe(stage.seen, bad, most=ended)
        with pytest.raises(TaskError, match="the probe is gone"):
            stage.look(first, stage.repeater(Remembering(stage.seen)))
        rest = Probe(stage.seen, bad)
        assert stage.look(rest, stage.repeater(Remembering(stage.seen))) == (step, found)
        assert first.asked + rest.asked == whole.asked


def test_a_line_that_was_being_written_is_asked_for_again(stage: Stage) -> None:
    bad = frozenset({stage.group(STEP)})
    whole = Probe(stage.seen, bad)
    expected = stage.look(whole, stage.repeater(Remembering(stage.seen)))
    file = stage.folder / "values.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    again = Probe(stage.seen, bad)
    assert stage.look(again, stage.repeater(Remembering(stage.seen))) == expected
    assert len(again.asked) == len(whole.asked) - 4
    assert file.read_bytes() == b"".join(lines)


@pytest.fixture
def call(stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command line on the stage's run; trainer and probe are those of the test."""
    probe = Probe(stage.seen, frozenset({stage.group(STEP)}))

    @contextmanager
    def opened(*_: Any) -> Iterator[Probe]:
        yield probe

    monkeypatch.setattr(command, "opened_probe", opened)
    monkeypatch.setattr(probed_runs, "open_trainer", lambda *_: Remembering(stage.seen))
    return caller(monkeypatch, capsys)


def test_the_command_says_what_did_it_and_leaves_the_log_as_it_was(
    copy: RecordedRun, stage: Stage, call: Call
) -> None:
    before = copy.log.read_bytes()
    words = ("bisect", str(copy.directory), "--good", "2", "--bad", "13", "--draws", "32")
    code, out, err = call(*words)
    assert code == 0, err
    assert out.splitlines()[0].startswith("settings changed between version 2 and version 13: ")
    assert "step 7: trainer.learning_rate 1e-05 -> 2e-05" in out.splitlines()[0]
    assert f"step {STEP} made the first bad version" in out
    assert f"without {stage.group(STEP)}" in out.splitlines()[-1]
    assert copy.log.read_bytes() == before
    code, plain, _ = call(*words, "--json")
    found = json.loads(plain)
    assert code == 0
    assert [one["name"] for one in found["explanation"]["cause"]] == [stage.group(STEP)]
    assert (found["last_good"], found["first_bad"]) == (STEP, STEP + 1)
    assert out.splitlines()[-1] == found["explanation"]["conclusion"][-1]
    assert not (Path(found["folder"]) / "scratch").exists()


def test_versions_that_are_none_are_refused_with_those_that_there_are(
    copy: RecordedRun, call: Call
) -> None:
    for good, bad in (("5", "5"), ("9", "3"), ("0", "99")):
        code, out, err = call("bisect", str(copy.directory), "--good", good, "--bad", bad)
        assert (code, out) == (2, "")
        assert f"nothing between version {good} and version {bad}" in err
        assert f"there are versions 0 to {STEPS}" in err


def test_versions_are_told_apart_from_trials_by_what_they_are_called() -> None:
    assert Version(3).words == "version 3"

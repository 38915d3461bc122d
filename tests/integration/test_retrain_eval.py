"""`retrain --eval`: last versions by the draws of one probe, remembered in the runs they are of.

Method: retrained runs of the recorded one; what a probe says follows from the digest of weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dora_pipe.audit.bisect import Values
from dora_pipe.audit.repeat_steps import MadeWeights
from dora_pipe.cli import retrain_eval
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.cli.retrain_eval import Evaluation, Evaluator
from dora_pipe.launch.run_dir import opened
from tests.support.recorded_run import RecordedRun
from tests.support.retrained import NAME, commits, retrained

VERSION = 8


@dataclass(slots=True)
class DigestProbe:
    """A draw is worth what a digit of the digest says."""

    asked: list[tuple[str, int, int]] = field(default_factory=list)
    digest: str = "d"
    engine: str = ""
    direction: float | None = 1.0

    def begin(self, folder: Path) -> None:
        """It keeps nothing."""

    def values(self, weights: Path, made: MadeWeights, first: int, last: int) -> Values:
        assert weights.is_file()
        self.asked.append((made.digest, first, last))
        return [float(int(made.digest[at % 64], 16)) for at in range(first, last)]


@pytest.fixture(scope="module")
def root(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run with steps 5 to 7 trained again, with nothing otherwise and with a rate."""
    root = tmp_path_factory.mktemp("runs")
    recorded.copy(root / NAME)
    retrained(root, "same")
    retrained(root, "other", overrides=("trainer.learning_rate=0.5",))
    return root


Asking = Callable[..., Evaluator]


@pytest.fixture
def asking(root: Path, tmp_path: Path) -> Iterator[Asking]:
    """Makes what asks a probe of runs that nobody has asked of before."""
    runs = shutil.copytree(root, tmp_path / "runs")
    with opened(NAME, runs) as source:
        yield lambda probe, draws=8, stop=lambda: False: Evaluator(
            source=source,
            probe=probe,
            wanted=Evaluation(draws=draws),
            stop=stop,
            report=CommandProgress(),
        )


def test_a_setting_with_nothing_otherwise_has_learnt_what_the_source_has(asking: Asking) -> None:
    found = asking(DigestProbe()).learnt("same", VERSION)
    assert found is not None and found.value == found.source
    assert (found.draws, found.gain.low, found.gain.high) == (8, 0.0, 0.0)


def test_every_run_is_asked_by_its_own_weights_and_the_source_once(
    asking: Asking, root: Path
) -> None:
    probe = DigestProbe()
    evaluator = asking(probe)
    for name in ("other", "same", "other"):
        assert evaluator.learnt(name, VERSION) is not None
    source = commits(root, NAME)[VERSION - 1].digest_after
    other = commits(root, "other")[-1].digest_after
    assert other != source
    assert probe.asked == [(other, 0, 8), (source, 0, 8), (source, 0, 8)], "same is a run as well"


def test_values_are_remembered_and_only_more_draws_are_asked_for(asking: Asking) -> None:
    first, again, more = DigestProbe(), DigestProbe(), DigestProbe()
    found = asking(first).learnt("other", VERSION)
    assert asking(again).learnt("other", VERSION) == found and not again.asked
    assert asking(more, draws=12).learnt("other", VERSION) is not None
    assert {(begin, end) for _, begin, end in more.asked} == {(8, 12)}


def test_it_stops_between_two_pieces_and_goes_on_there(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrain_eval, "PIECE", 3)
    probe = DigestProbe()
    assert asking(probe, stop=lambda: len(probe.asked) == 2).learnt("other", VERSION) is None
    assert [(begin, end) for _, begin, end in probe.asked] == [(0, 3), (3, 6)]
    assert asking(probe).learnt("other", VERSION) is not None
    assert [(begin, end) for _, begin, end in probe.asked[2:]] == [(6, 8), (0, 3), (3, 6), (6, 8)]

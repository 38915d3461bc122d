"""`retrain --eval N`: what the last versions of retrained runs are worth, beside the source's.

The probe is one of `bisect`, with the rows and seeds of the source; values are remembered in the
folder of the run that they are of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.audit.bisect import Ask, Values, Version
from dora_pipe.audit.learnt import Learnt, learnt
from dora_pipe.audit.measuring import Measuring
from dora_pipe.catalogue.evaluations import Interval
from dora_pipe.cli.output import show
from dora_pipe.cli.probed_runs import SCRATCH, Subjects, probed_file
from dora_pipe.cli.probes import Probe, opened_probe
from dora_pipe.cli.progress import CommandProgress, progress
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.clock import SystemClock
from dora_pipe.launch.run_dir import OpenRun, opened

PIECE: Final = 128
"""Draws that are asked for at a time; between two of them the user may stop it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is asked of every run. Example: ``Evaluation(probe="eval:hard", draws=512)``."""

    draws: int
    probe: str = "eval"


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Asks one probe of the last version of each run and of the same version of the source."""

    source: OpenRun
    probe: Probe
    wanted: Evaluation
    stop: Callable[[], bool]
    report: CommandProgress

    def learnt(self, name: str, version: int) -> Learnt | None:
        """A version of a run beside the source's; None where the user stopped it.

        Raises UsageError, TaskError, PolicyError, ResourceError.
        """
        with opened(name, self.source.directory.path.parent) as run:
            own = self._values(run, version)
        theirs = None if own is None else self._values(self.source, version)
        return None if own is None or theirs is None else learnt(own, theirs)

    def _values(self, run: OpenRun, version: int) -> Values | None:
        history = read_history(run.bus, run.topics, SystemClock())
        file = probed_file(run, history, self.wanted.probe, self.probe)
        subjects = Subjects(run, history, file.folder / SCRATCH)
        self.probe.begin(file.folder / SCRATCH)
        with progress(f"evaluating version {version} of {run.topics.run}", self.report):
            measuring = Measuring(probe=self.probe, file=file, weights=subjects.weights)
            subject, total, values = Version(version), self.wanted.draws, list[float | None]()
            while len(values) < total:
                if self.stop():
                    return None
                many = min(len(values) + PIECE, total)
                values = list(measuring.values(Ask(subject=subject, draws=many)))
                if len(values) < many:
                    break
        subjects.forget()
        return values


@contextmanager
def evaluator(
    run: str, wanted: Evaluation | None, root: Path, stop: Callable[[], bool]
) -> Iterator[Evaluator | None]:
    """What evaluates the runs of a source; None where nobody wants it.

    Raises UsageError, ConfigError, TaskError for a probe that cannot be asked, before anything is
    trained.
    """
    if wanted is None:
        yield None
        return
    report = CommandProgress()
    with opened(run, root) as source, ExitStack() as stack:
        with progress("opening the probe", report):
            probe = stack.enter_context(opened_probe(source, wanted.probe, None, report))
        yield Evaluator(source=source, probe=probe, wanted=wanted, stop=stop, report=report)


def words(one: Interval) -> str:
    """Example: ``0.91 (0.88 to 0.93)``."""
    return f"{show(one.value)} ({show(one.low)} to {show(one.high)})"

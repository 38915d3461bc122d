"""What a probe is asked of: the weights of a run's versions and trials; and the folder where it is
remembered what was said of them. `bisect` and `retrain --eval` ask so, and neither asks twice.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from dora_pipe.audit.bisect import Subject, Trial
from dora_pipe.audit.probed_file import FOLDER, AboutProbe, ProbedFile
from dora_pipe.audit.rebuild import Rebuilder
from dora_pipe.audit.repeat_steps import MadeWeights, StepRepeater
from dora_pipe.cli.probes import Probe
from dora_pipe.cli.replay import open_trainer, rebuilder
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.core.clock import SystemClock
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.schemas.wire import canonical, sha256_hex

DIGITS: Final = 12
"""Of that digest, in the folder's name."""

SCRATCH: Final = "scratch"
"""States of the trainer and what the probe samples, in its folder, until the command is done."""


def probed_file(run: OpenRun, history: CommitHistory, words: str, probe: Probe) -> ProbedFile:
    """The folder of what this probe has said of this run."""
    assert history.run_started is not None
    about = AboutProbe(
        run=run.topics.run,
        started_ns=history.run_started.at_ns,
        probe=words,
        digest=probe.digest,
        engine=probe.engine,
    )
    digest = sha256_hex(canonical(about))[:DIGITS]
    file = ProbedFile(run.directory.path / FOLDER / digest)
    file.begin(about)
    return file


class Subjects:
    """Makes the weights of versions and trials; a trainer is opened when one is needed."""

    def __init__(self, run: OpenRun, history: CommitHistory, scratch: Path) -> None:
        self._run, self._history, self._scratch = run, history, scratch
        self._store = run.policies
        self._rebuilder: Rebuilder | None = None
        self._repeater: StepRepeater | None = None

    @property
    def led(self) -> int:
        """Steps that were trained again as they were."""
        return 0 if self._repeater is None else self._repeater.led

    def is_kept(self, version: int) -> bool:
        return self._store.has_weights(self._history.digest_of(version))

    def weights(self, subject: Subject) -> tuple[Path, MadeWeights]:
        if isinstance(subject, Trial):
            return self.repeater().train(subject)
        self._rebuilder = self._rebuilder or rebuilder(self._run)
        path = self._rebuilder.weights(subject.version)
        digest = self._history.digest_of(subject.version)
        dtype = self._store.verify(digest).dtype
        return path, MadeWeights(of=subject.words, digest=digest, dtype=dtype)

    def repeater(self) -> StepRepeater:
        """Trains steps again; the one that makes versions lets its trainer go."""
        if self._repeater is None:
            assert self._history.run_started is not None
            self._rebuilder = None
            self._repeater = StepRepeater(
                self._run.bus,
                self._run.topics,
                self._store,
                self._history,
                open_trainer(self._run, self._history.run_started),
                folder=self._scratch,
                clock=SystemClock(),
            )
        return self._repeater

    def forget(self) -> None:
        """Remove states of the trainer, and what the probe has kept."""
        shutil.rmtree(self._scratch, ignore_errors=True)

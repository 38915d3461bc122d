"""What a version is made of whose run has no rounds: steps of another run that were trained again.

A run of `retrain` has a log without a chain, so it has no certificate. A run that began with one of
its versions has, and there this stands for it: which steps of which run, by their batches and
weights, and what of them was otherwise. The run whose steps they are follows in the lineage.
"""

from __future__ import annotations

from dora_pipe.audit.certificate import TrainedAgain, steps_digest
from dora_pipe.bus.port import Bus
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.recovery import read_commits
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.control import Lineage, RunStarted
from dora_pipe.schemas.topics import Topics


def again_of(
    bus: Bus, topics: Topics, history: CommitHistory, version: int, clock: Clock
) -> tuple[TrainedAgain | None, str, Lineage | None]:
    """What a version of such a run is made of, its weights digest, and what the run began with; no
    first where the run is none that was trained again.

    Raises InvariantBroken where it has no such version, BusError.
    """
    started = history.run_started
    if started is None or started.retrained is None:
        return None, "", None
    first = started.retrained.first
    if not (version in {0, first} or first < version <= history.next_step):
        raise InvariantBroken(
            f"lineage: run {started.run} has no version {version} here",
            hint="is it another run of that name? --runs DIR says where runs lie",
        )
    notes = history.notes[min(first, version) : version]
    commits = read_commits(bus, topics, notes, clock)
    retrained = started.retrained
    again = TrainedAgain(
        source=retrained.run,
        first=first,
        steps=len(notes),
        digest=steps_digest(commits),
        settings=dict(retrained.settings),
        change="" if retrained.change is None else retrained.change.sha256,
    )
    return again, history.digest_of(version), _above(started, version)


def _above(started: RunStarted, version: int) -> Lineage | None:
    """Version 0 of such a run is that of its source, whatever step it begins with."""
    lineage = started.lineage
    if version or lineage is None:
        return lineage
    return Lineage(run=lineage.run, step=0, digest=started.policy.digest)

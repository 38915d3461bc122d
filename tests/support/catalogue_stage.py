"""A catalogue for tests, told fact by fact; and the two accounts of one log held side by side."""

from __future__ import annotations

from contextlib import closing

from dora_pipe.audit.audit import build_ledger
from dora_pipe.bus.port import Bus
from dora_pipe.catalogue.builder import CatalogueBuilder
from dora_pipe.catalogue.database import Catalogue
from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.schemas.control import AnyControl, TakenGroup, TakenTrajectory
from dora_pipe.schemas.identity import Purpose, trajectory_id
from dora_pipe.schemas.rounds import End, Fate, GroupSpec, Round, TakeBatch
from dora_pipe.schemas.topics import Topics
from tests.support import orchestrator_records as records
from tests.support.told_run import SECOND_NS, SIBLINGS, ToldRun


class CatalogueStage(ToldRun):
    """A run that is told by hand, a second after the other; `catalogue` has its tables."""

    def __init__(self) -> None:
        self.builder = CatalogueBuilder()
        self._catalogue = Catalogue()
        super().__init__()

    @property
    def catalogue(self) -> Catalogue:
        """The tables as of now."""
        self._catalogue.append(self.builder.drain())
        self._catalogue.refresh(self.builder.live())
        return self._catalogue

    def take_fact(self, offset: int, fact: AnyControl) -> None:
        """See the base."""
        self.builder.fact(offset, fact)

    def take_round(self, round_: Round) -> None:
        """See the base."""
        self.builder.round(round_, round_.ordinal)

    def worker(self, name: str = "w0", slots: int = 4) -> int:
        """A worker joins; its incarnation."""
        return self.fact(records.joined(name, slots=slots))

    def group(self, ordinal: int, version: int = 0, purpose: Purpose = "train") -> GroupSpec:
        """A group is dispatched."""
        spec = self.spec(ordinal, version, purpose)
        self.decide(self.dispatch(spec))
        return spec

    def place(self, spec: GroupSpec, epoch: int, *, worker: str = "w0", attempt: int = 1) -> None:
        """All siblings go to a worker."""
        self.decide(self.placed(spec, worker, epoch, attempt))

    def log(
        self,
        spec: GroupSpec,
        epoch: int,
        *,
        attempt: int = 1,
        rewards: tuple[float | None, ...] = (1.0, 0.0),
        tokens: int = 20,
        offset: int = 0,
    ) -> None:
        """w0 says that all siblings lie in the log, a second later."""
        self.logged(spec, epoch, rewards, attempt=attempt, tokens=tokens, offset=offset)

    def taken(self, spec: GroupSpec, offset: int = 0) -> TakenGroup:
        """A group as a batch names it."""
        return TakenGroup(
            group=spec.group,
            version=spec.version,
            deadline=spec.deadline,
            trajectories=tuple(
                TakenTrajectory(
                    trajectory=trajectory_id(spec.group, sibling),
                    attempt=1,
                    epoch=0,
                    partition=0,
                    offset=offset + sibling,
                    sha256="s",
                )
                for sibling in range(SIBLINGS)
            ),
        )

    def take(self, step: int, *specs: GroupSpec, attempt: int = 1) -> tuple[TakenGroup, ...]:
        """A batch is taken."""
        groups = tuple(self.taken(one) for one in specs)
        self.decide(
            TakeBatch(reason="all finished", step=step, attempt=attempt, groups=groups, settings={})
        )
        return groups

    def train(self, step: int, *specs: GroupSpec) -> None:
        """A batch is taken and its step committed, a second apart."""
        groups = self.take(step, *specs)
        self.now_ns += SECOND_NS
        self.fact(records.committed(step, groups))

    def end(self, spec: GroupSpec, fate: Fate, why: str = "because") -> None:
        """A group ends otherwise."""
        self.decide(End(reason=why, group=spec.group, fate=fate))


def differences(bus: Bus, topics: Topics) -> list[str]:
    """Where the catalogue of a log and audit's ledger of it do not say the same, by group."""
    ledger = build_ledger(bus, topics)
    with closing(read_catalogue(bus, topics)) as catalogue:
        said = {
            name: (fate, step if fate == "trained" else None, tuple(places or ()))
            for name, fate, step, places in catalogue.query(
                """select group_id, any_value(fate), any_value(step),
                          list((trajectory_id, partition, record_offset) order by trajectory_id)
                              filter (record_offset is not null)
                   from groups join trajectories using (group_id) group by group_id"""
            )
        }
        standings = dict(
            catalogue.query("select standing, count(*) from records group by standing")
        )
    known = {
        name: (
            group.fate or "open",
            group.step,
            tuple((one.fact.trajectory, *one.place) for one in group.results),
        )
        for name, group in ledger.accounts.groups.items()
    }
    found = [
        f"{name}: {known.get(name)} by the ledger, {said.get(name)} by the catalogue"
        for name in sorted(known.keys() | said.keys())
        if known.get(name) != said.get(name)
    ]
    counted: dict[str, int] = {}
    for one in ledger.accounts.logged.values():
        counted[one.standing] = counted.get(one.standing, 0) + 1
    if counted != standings:
        found.append(f"records: {counted} by the ledger, {standings} by the catalogue")
    return found

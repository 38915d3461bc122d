"""Handwritten catalogue, and comparison of the catalogue and the ledger of a log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from dora_pipe.bus.bus import Bus
from dora_pipe.ledger.builder import CatalogueBuilder
from dora_pipe.ledger.database import Catalogue
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.schemas.control import (
    AnyControl,
    ExclusiveRole,
    LoggedEntry,
    TakenGroup,
    TakenTrajectory,
    TrajectoriesLogged,
)
from dora_pipe.schemas.identity import Purpose, group_id, trajectory_id
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Dispatch,
    End,
    GroupSpec,
    Outcome,
    Round,
    Schedule,
    ScheduledSample,
    TakeBatch,
    TakePart,
)
from dora_pipe.schemas.topics import Topics
from tests.support import orchestrator_records as records
from tests.support.ledgers import build_ledger

SECOND_NS = 1_000_000_000
START_NS = 1_000 * SECOND_NS
SAMPLES = 2


class HandwrittenRun(ABC):
    """Run told record by record, one second each; subclasses fold the records."""

    def __init__(self, **config: Any) -> None:
        self.now_ns = START_NS
        self.offset = 0
        self.rounds = 0
        self.orchestrator = 0
        self.fact(records.run_started(records.make_config(**config)))
        self.fact(records.role_started("trainer", 0))

    @abstractmethod
    def take_fact(self, offset: int, fact: AnyControl) -> None:
        """Fold a control record."""

    @abstractmethod
    def take_round(self, round_: Round) -> None:
        """Fold a round."""

    def fact(self, fact: AnyControl) -> int:
        self.offset += 1
        self.take_fact(self.offset, replace(fact, at_ns=self.now_ns))
        return self.offset

    def begins(self, role: ExclusiveRole, incarnation: int) -> None:
        self.now_ns += SECOND_NS
        if role == "orchestrator":
            self.orchestrator = incarnation
        self.fact(records.role_started(role, incarnation))

    def decide(self, *decisions: AnyDecision) -> None:
        self.now_ns += SECOND_NS
        round_ = Round(
            ordinal=self.rounds,
            incarnation=self.orchestrator,
            now_ns=self.now_ns,
            control_next=self.offset + 1,
            decisions=decisions,
        )
        self.rounds += 1
        self.take_round(round_)

    def spec(self, ordinal: int, version: int = 0, purpose: Purpose = "train") -> GroupSpec:
        return GroupSpec(
            group=group_id(purpose, ordinal),
            ordinal=ordinal,
            purpose=purpose,
            version=version,
            digest=records.weights(version),
            deadline=-1 if purpose == "eval" else version + 1,
            partition=0,
            dataset_digest="d",
            index=3,
            data_epoch=0,
            seed=0,
            size=SAMPLES,
        )

    def dispatch(self, spec: GroupSpec) -> Dispatch:
        return Dispatch(reason="a slot is free", spec=spec)

    def placed(self, spec: GroupSpec, worker: str, incarnation: int, attempt: int = 1) -> Schedule:
        samples = tuple(ScheduledSample(sample=index, attempt=attempt) for index in range(SAMPLES))
        return Schedule(
            reason="its turn", spec=spec, worker=worker, incarnation=incarnation, samples=samples
        )

    def logged(
        self,
        spec: GroupSpec,
        incarnation: int,
        rewards: tuple[float | None, ...],
        *,
        attempt: int = 1,
        tokens: int = 20,
        offset: int | None = None,
        text: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self.now_ns += SECOND_NS
        first = _first_offset(spec, attempt) if offset is None else offset
        entries = tuple(
            LoggedEntry(
                trajectory=trajectory_id(spec.group, sample),
                attempt=attempt,
                partition=0,
                offset=first + sample,
                sha256="s",
                bytes=10,
                tokens=tokens,
                reward=reward,
                finish="stop",
                **text.get(sample, {}),
            )
            for sample, reward in enumerate(rewards)
        )
        self.fact(
            TrajectoriesLogged(
                at_ns=0,
                worker="w0",
                incarnation=incarnation,
                version=0,
                digest="d",
                trajectories=entries,
            )
        )


def _first_offset(spec: GroupSpec, attempt: int) -> int:
    """Return the first record's offset, its own for every attempt."""
    return 1000 * spec.ordinal + 100 * (attempt - 1) + 50 * (spec.purpose == "eval")


class CatalogueStage(HandwrittenRun):
    def __init__(self) -> None:
        self.builder = CatalogueBuilder()
        self._catalogue = Catalogue()
        super().__init__()

    @property
    def catalogue(self) -> Catalogue:
        self._catalogue.append(self.builder.drain())
        self._catalogue.refresh(self.builder.live())
        return self._catalogue

    def take_fact(self, offset: int, fact: AnyControl) -> None:
        self.builder.fact(offset, fact)

    def take_round(self, round_: Round) -> None:
        self.builder.round(round_, round_.ordinal)

    def worker(self, name: str = "w0", slots: int = 4) -> int:
        return self.fact(records.joined(name, slots=slots))

    def group(self, ordinal: int, version: int = 0, purpose: Purpose = "train") -> GroupSpec:
        spec = self.spec(ordinal, version, purpose)
        self.decide(self.dispatch(spec))
        return spec

    def place(
        self, spec: GroupSpec, incarnation: int, *, worker: str = "w0", attempt: int = 1
    ) -> None:
        self.decide(self.placed(spec, worker, incarnation, attempt))

    def log(
        self,
        spec: GroupSpec,
        incarnation: int,
        *,
        attempt: int = 1,
        rewards: tuple[float | None, ...] = (1.0, 0.0),
        tokens: int = 20,
        offset: int | None = None,
    ) -> None:
        self.logged(spec, incarnation, rewards, attempt=attempt, tokens=tokens, offset=offset)

    def taken(self, spec: GroupSpec, offset: int = 0) -> TakenGroup:
        return TakenGroup(
            group=spec.group,
            version=spec.version,
            deadline=spec.deadline,
            trajectories=tuple(
                TakenTrajectory(
                    trajectory=trajectory_id(spec.group, sample),
                    attempt=1,
                    incarnation=0,
                    partition=0,
                    offset=offset + sample,
                    sha256="s",
                )
                for sample in range(SAMPLES)
            ),
        )

    def part(self, step: int, part: int, *specs: GroupSpec) -> None:
        groups = tuple(self.taken(spec) for spec in specs)
        first_part = TakePart(
            reason="some finished", step=step, attempt=1, part=part, groups=groups, settings={}
        )
        self.decide(first_part)

    def take(
        self, step: int, *specs: GroupSpec, attempt: int = 1, parts: tuple[int, ...] = ()
    ) -> tuple[TakenGroup, ...]:
        groups = tuple(self.taken(spec) for spec in specs)
        batch = TakeBatch(
            reason="all finished",
            step=step,
            attempt=attempt,
            groups=groups,
            settings={},
            parts=parts,
        )
        self.decide(batch)
        return groups

    def train(
        self,
        step: int,
        *specs: GroupSpec,
        parts: tuple[int, ...] = (),
        early_s: tuple[float, ...] = (),
        **changes: Any,
    ) -> None:
        groups = self.take(step, *specs, parts=parts)
        self.now_ns += SECOND_NS
        fact = replace(records.committed(step, groups), parts=parts, early_s=early_s, **changes)
        self.fact(fact)

    def end(self, spec: GroupSpec, outcome: Outcome, why: str = "because") -> None:
        self.decide(End(reason=why, group=spec.group, outcome=outcome))


def differences(bus: Bus, topics: Topics) -> list[str]:
    ledger = build_ledger(bus, topics)
    with closing(read_catalogue(bus, topics)) as catalogue:
        by_catalogue = {
            name: (outcome, step if outcome == "trained" else None, tuple(places or ()))
            for name, outcome, step, places in catalogue.query(
                """select group_id, any_value(groups.outcome), any_value(step),
                          list((trajectory_id, partition, record_offset) order by trajectory_id)
                              filter (record_offset is not null)
                   from groups join trajectories using (group_id) group by group_id"""
            )
        }
        standings = dict(catalogue.query("select status, count(*) from records group by status"))
    by_ledger = {
        name: (
            group.outcome or "open",
            group.step,
            tuple((result.fact.trajectory, *result.place) for result in group.bound),
        )
        for name, group in ledger.accounts.groups.items()
    }
    results = [
        f"{name}: {by_ledger.get(name)} by the ledger, {by_catalogue.get(name)} by the catalogue"
        for name in sorted(by_ledger.keys() | by_catalogue.keys())
        if by_ledger.get(name) != by_catalogue.get(name)
    ]
    counted: dict[str, int] = {}
    for fact in ledger.accounts.logged.values():
        counted[fact.status] = counted.get(fact.status, 0) + 1
    if counted != standings:
        results.append(f"records: {counted} by the ledger, {standings} by the catalogue")
    return results

"""A run that tests tell by hand, fact by fact and round by round, to whatever folds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from msgspec.structs import replace

from dora_pipe.schemas.control import AnyControl, LoggedEntry, TrajectoriesLogged
from dora_pipe.schemas.identity import Purpose, group_id, trajectory_id
from dora_pipe.schemas.rounds import AnyDecision, Dispatch, GroupSpec, Place, PlacedSibling, Round
from tests.support import orchestrator_records as records

SECOND_NS = 1_000_000_000
START_NS = 1_000 * SECOND_NS
SIBLINGS = 2


class ToldRun(ABC):
    """Time goes on by a second with every round and report; a subclass folds what is told."""

    def __init__(self, **config: Any) -> None:
        """`config` as `make_config` takes it."""
        self.now_ns = START_NS
        self.offset = 0
        self.rounds = 0
        self.fact(records.run_started(records.make_config(**config)))
        self.fact(records.role_started("trainer", 0))

    @abstractmethod
    def take_fact(self, offset: int, fact: AnyControl) -> None:
        """Fold a control record."""

    @abstractmethod
    def take_round(self, round_: Round) -> None:
        """Fold a round."""

    def fact(self, fact: AnyControl) -> int:
        """A control record at this moment; its offset."""
        self.offset += 1
        self.take_fact(self.offset, replace(fact, at_ns=self.now_ns))
        return self.offset

    def decide(self, *decisions: AnyDecision) -> None:
        """A round of these, a second later."""
        self.now_ns += SECOND_NS
        round_ = Round(
            ordinal=self.rounds,
            role_epoch=0,
            now_ns=self.now_ns,
            control_next=self.offset + 1,
            decisions=decisions,
        )
        self.rounds += 1
        self.take_round(round_)

    def spec(self, ordinal: int, version: int = 0, purpose: Purpose = "train") -> GroupSpec:
        """A group as its dispatch names it."""
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
            size=SIBLINGS,
        )

    def dispatch(self, spec: GroupSpec) -> Dispatch:
        """Its dispatch."""
        return Dispatch(reason="a slot is free", spec=spec)

    def placed(self, spec: GroupSpec, worker: str, epoch: int, attempt: int = 1) -> Place:
        """All siblings go to a worker."""
        siblings = tuple(PlacedSibling(sibling=one, attempt=attempt) for one in range(SIBLINGS))
        return Place(reason="its turn", spec=spec, worker=worker, epoch=epoch, siblings=siblings)

    def logged(
        self,
        spec: GroupSpec,
        epoch: int,
        rewards: tuple[float | None, ...],
        *,
        attempt: int = 1,
        tokens: int = 20,
        offset: int = 0,
    ) -> None:
        """w0 says that siblings lie in the log, a second later."""
        self.now_ns += SECOND_NS
        entries = tuple(
            LoggedEntry(
                trajectory=trajectory_id(spec.group, sibling),
                attempt=attempt,
                partition=0,
                offset=offset + sibling,
                sha256="s",
                bytes=10,
                tokens=tokens,
                reward=reward,
                finish="stop",
            )
            for sibling, reward in enumerate(rewards)
        )
        self.fact(
            TrajectoriesLogged(
                at_ns=0, worker="w0", epoch=epoch, version=0, digest="d", trajectories=entries
            )
        )

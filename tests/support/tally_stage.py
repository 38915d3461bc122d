"""A tally for tests, told fact by fact; and the tally of a whole log."""

from __future__ import annotations

from msgspec.structs import replace

from dora_pipe.bus.port import Bus
from dora_pipe.schemas.control import AnyControl, LoggedEntry, TrajectoriesLogged
from dora_pipe.schemas.identity import Purpose, group_id, trajectory_id
from dora_pipe.schemas.metrics import Cost, TrainerStatus, Wait, WorkerStatus
from dora_pipe.schemas.rounds import AnyDecision, Dispatch, GroupSpec, Place, PlacedSibling, Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.telemetry.log_feed import LogFeed
from dora_pipe.telemetry.tally import Tally
from tests.support import orchestrator_records as records

SECOND_NS = 1_000_000_000
START_NS = 1_000 * SECOND_NS
COST = Cost(total_s=2.0, bus_s=0.5, control_s=0.25, codec_s=0.25, rss_bytes=1000)


def tally_of(bus: Bus, topics: Topics) -> Tally:
    """Everything that a log says."""
    feed = LogFeed(bus, topics, Tally(topics.run))
    while feed.advance():
        pass
    feed.close()
    return feed.tally


class Stage:
    """A run that is told by hand. Example: ``Stage().worker("w0")``."""

    def __init__(self) -> None:
        self.tally = Tally(records.RUN)
        self.now_ns = START_NS
        self.offset = 0
        self.rounds = 0
        self.fact(records.run_started(records.make_config()))
        self.fact(records.role_started("trainer", 0))

    def fact(self, fact: AnyControl) -> int:
        """A control record at this moment; its offset."""
        self.offset += 1
        self.tally.fact(self.offset, replace(fact, at_ns=self.now_ns))
        return self.offset

    def decide(self, *decisions: AnyDecision) -> None:
        """A round of these, a second later."""
        self.now_ns += SECOND_NS
        self.tally.round(
            Round(
                ordinal=self.rounds,
                role_epoch=0,
                now_ns=self.now_ns,
                control_next=self.offset + 1,
                decisions=decisions,
            ),
            self.rounds,
        )
        self.rounds += 1

    def worker(self, name: str = "w0", version: int = 0) -> int:
        """A worker that is ready; its role epoch."""
        epoch = self.fact(records.joined(name))
        self.fact(records.ready(name, epoch, version))
        return epoch

    def group(self, ordinal: int, epoch: int, *, purpose: Purpose = "train") -> GroupSpec:
        """A group of two is dispatched under version 0 and placed on w0."""
        spec = GroupSpec(
            group=group_id(purpose, ordinal),
            ordinal=ordinal,
            purpose=purpose,
            version=0,
            digest=records.weights(0),
            deadline=-1 if purpose == "eval" else 1,
            partition=0,
            dataset_digest="d",
            index=3,
            data_epoch=0,
            seed=0,
            size=2,
        )
        siblings = tuple(PlacedSibling(sibling=one, attempt=1) for one in range(2))
        place = Place(reason="its turn", spec=spec, worker="w0", epoch=epoch, siblings=siblings)
        self.decide(Dispatch(reason="a slot is free", spec=spec), place)
        return spec

    def log(self, spec: GroupSpec, epoch: int, *rewards: float | None) -> None:
        """w0 says that siblings lie in the log, a second later."""
        self.now_ns += SECOND_NS
        entries = tuple(
            LoggedEntry(
                trajectory=trajectory_id(spec.group, sibling),
                attempt=1,
                partition=0,
                offset=sibling,
                sha256="s",
                bytes=10,
                tokens=20,
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

    def status(self, name: str, epoch: int, *, active: int = 1, sampled: int = 0) -> None:
        """A worker says what it does."""
        self.tally.status(
            WorkerStatus(
                at_ns=self.now_ns,
                cost=COST,
                worker=name,
                epoch=epoch,
                version=0,
                active=active,
                waiting=0,
                kv_used_tokens=256,
                tokens_total=sampled,
                progress={},
            )
        )

    def trainer(self, *waits: Wait, role_epoch: int = 0) -> None:
        """The trainer says what it waits for."""
        self.tally.status(
            TrainerStatus(
                at_ns=self.now_ns,
                cost=COST,
                waits=waits,
                role_epoch=role_epoch,
                step=0,
                phase="idle",
                cached_records=3,
                cached_bytes=300,
            )
        )

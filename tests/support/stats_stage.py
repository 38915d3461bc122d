"""Run statistics for tests, from handwritten records or an entire log."""

from __future__ import annotations

from typing import Any

import msgspec

from dora_pipe.bus.bus import Bus
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.identity import Purpose
from dora_pipe.schemas.metrics import Cost, TrainerStatus, Wait, WorkerStatus
from dora_pipe.schemas.rounds import Assign, GroupSpec, Round
from dora_pipe.schemas.topics import Topics
from tests.support import orchestrator_records as records
from tests.support.catalogue_stage import HandwrittenRun

COST = Cost(total_s=2.0, bus_s=0.5, control_s=0.25, codec_s=0.25, rss_bytes=1000)


def stats_of(bus: Bus, topics: Topics) -> RunStats:
    stats = RunStats(topics.run)
    stats.read(bus, topics)
    return stats


class Stage(HandwrittenRun):
    def __init__(self, *, stats: RunStats | None = None, **config: Any) -> None:
        self.stats = RunStats(records.RUN) if stats is None else stats
        super().__init__(**config)

    def take_fact(self, offset: int, fact: AnyControl) -> None:
        self.stats.fact(offset, fact)

    def take_round(self, round_: Round) -> None:
        self.stats.round(round_, round_.ordinal)

    def worker(self, name: str = "w0", version: int = 0) -> int:
        incarnation = self.fact(records.joined(name))
        self.fact(records.ready(name, incarnation, version))
        return incarnation

    def assign(self, name: str, incarnation: int, version: int) -> None:
        digest = records.weights(version) if version >= 0 else ""
        self.decide(
            Assign(
                reason="new", worker=name, incarnation=incarnation, version=version, digest=digest
            )
        )

    def group(
        self, ordinal: int, incarnation: int, *, purpose: Purpose = "train", **names: str
    ) -> GroupSpec:
        """Dispatch a group of two under version 0 and place it on w0."""
        spec = msgspec.structs.replace(self.spec(ordinal, purpose=purpose), **names)
        self.decide(self.dispatch(spec), self.placed(spec, "w0", incarnation))
        return spec

    def log(self, spec: GroupSpec, incarnation: int, *rewards: float | None) -> None:
        self.logged(spec, incarnation, rewards)

    def status(
        self,
        name: str,
        incarnation: int,
        *,
        active: int = 1,
        sampled: int = 0,
        computed: int = 0,
        reused: int = 0,
        **more: Any,
    ) -> None:
        self.stats.status(
            WorkerStatus(
                **more,
                at_ns=self.now_ns,
                cost=COST,
                worker=name,
                incarnation=incarnation,
                version=0,
                active=active,
                waiting=0,
                kv_used_tokens=256,
                tokens_total=sampled,
                progress={},
                prompt_tokens_computed=computed,
                prompt_tokens_reused=reused,
            )
        )

    def trainer(self, *waits: Wait, incarnation: int = 0) -> None:
        self.stats.status(
            TrainerStatus(
                at_ns=self.now_ns,
                cost=COST,
                waits=waits,
                incarnation=incarnation,
                step=0,
                phase="idle",
                cached_records=3,
                cached_bytes=300,
            )
        )

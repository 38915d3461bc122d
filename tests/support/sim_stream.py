"""The stream of a sound run's records, replayed to an `InvariantMonitor` with one of them changed.

Rounds are chained anew after a change, so that what is found is the change and not the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dora_pipe.bus.port import Record
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.runtime import Machine
from dora_pipe.schemas.control import decode_control
from dora_pipe.schemas.rounds import GENESIS_CHAIN, Round, chain_of, decode_round, fold_bytes
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.sim.invariant_monitor import InvariantMonitor
from dora_pipe.sim.parts import WorkerPlan
from dora_pipe.sim.role import Role
from dora_pipe.sim.world import SECOND_NS, World
from tests.support.cluster import make_config

CONFIG = make_config(run__steps=4, timing__heartbeat_s=0.2)
PLANS = tuple(WorkerPlan(name=f"w{number}", slots=4, prefetch=2) for number in range(2))


@dataclass
class Keep:
    """A watcher that keeps what it sees."""

    records: list[Record]

    def appended(self, records: Sequence[Record], role: Role | None) -> None:
        self.records.extend(records)

    def overhear(self, role: Role, machine: Machine) -> Machine:
        return machine


def sound_run() -> list[Record]:
    """Control and decisions of a run without faults, in the order in which they were appended."""
    keep = Keep([])
    with World(CONFIG, workers=PLANS, watch=keep) as world:
        assert world.run(until_ns=600 * SECOND_NS)
        wanted = (world.topics.control, world.topics.decisions)
    return [record for record in keep.records if record.topic in wanted]


def decoded(record: Record) -> Any:
    """A control record or a round."""
    if record.topic.endswith("decisions"):
        return decode_round(record.value)
    return decode_control(record.value)


def changed(
    records: Iterable[Record], kind: type, change: Callable[[Any], Any], nth: int = 0
) -> list[Record]:
    """The stream with the nth record, or decision, of a kind replaced by `change` of it."""
    found: list[Record] = []
    for record in records:
        value = decoded(record)
        if isinstance(value, Round):
            decisions: list[Any] = []
            for one in value.decisions:
                if isinstance(one, kind):
                    one, nth = (change(one) if nth == 0 else one), nth - 1
                decisions += one if isinstance(one, list) else [one]
            value = msgspec.structs.replace(value, decisions=tuple(decisions))
        elif isinstance(value, kind):
            value, nth = (change(value) if nth == 0 else value), nth - 1
        found.append(replace(record, value=encode(value)))
    assert nth < 0, f"there are not so many of {kind.__name__}"
    return rechained(found)


def rechained(records: Sequence[Record]) -> list[Record]:
    """The stream with the chain of its rounds made whole."""
    control: list[Record] = []
    found, chain = [], GENESIS_CHAIN
    for record in records:
        value = decoded(record)
        if isinstance(value, Round):
            folded = [one for one in control if one.offset < value.control_next]
            control = [one for one in control if one.offset >= value.control_next]
            content = b"".join(fold_bytes(one.offset, one.value) for one in folded)
            chain = chain_of(chain, content, value)
            record = replace(record, value=encode(msgspec.structs.replace(value, chain=chain)))
        else:
            control.append(record)
        found.append(record)
    return found


def watched(records: Iterable[Record]) -> str:
    """What a fresh `InvariantMonitor` finds in the stream; empty when nothing."""
    watch = InvariantMonitor(
        Topics(CONFIG.run.name), heartbeat_ns=SECOND_NS // 5, lease_ns=SECOND_NS
    )
    try:
        for record in records:
            watch.appended([record], None)
        watch.at_end()
    except InvariantBroken as error:
        return error.message
    return ""

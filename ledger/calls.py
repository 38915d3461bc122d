"""The table `calls`: agents' model calls, read from records for each statement that names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from dora_pipe.bus.base import polls_until
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import Damage
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.ledger.database import COUNTS, Catalogue, LoggedRecord, TableMissing, logged_records
from dora_pipe.ledger.tables import CALLS, CallRow
from dora_pipe.schemas.contexts import Call, place_of
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Described
from dora_pipe.schemas.trajectory_codec import view_trajectory
from dora_pipe.schemas.wire import canonical

_WITH_CALLS: Final = f"""{COUNTS} and trajectory_id in (
    select trajectory_id from trajectories where calls > 0)"""


def ask(
    catalogue: Catalogue, bus: Bus, topics: Topics, sql: str, parameters: Sequence[Any] = ()
) -> tuple[list[str], list[tuple[Any, ...]], Damage]:
    """Answer like `Catalogue.ask`, with `calls`; also return unreadable records.

    Raises BusError, UsageError, ResourceError.
    """
    damage = Damage()
    try:
        names, rows = catalogue.ask(sql, parameters)
    except TableMissing as missing:
        if missing.table != CALLS.name:
            raise
        catalogue.lay(CALLS, _rows(catalogue, bus, topics, damage))
        names, rows = catalogue.ask(sql, parameters)
    return names, rows, damage


def call_rows(found: Described) -> Iterator[CallRow]:
    """Yield a record's calls in order of their answers."""
    idle = _idle_before(found.meta.calls, found.meta.times.scheduled)
    for number, call in enumerate(found.meta.calls):
        context, prompt_tokens = place_of(call, found.meta.contexts)
        ignored = call.ignored_settings
        yield CallRow(
            trajectory_id=found.trajectory,
            call=number,
            context=context,
            api=call.api,
            caller=call.caller or None,
            asked_ns=call.asked_ns,
            answered_ns=call.answered_ns,
            idle_ns=idle[number],
            prompt_tokens=prompt_tokens,
            tokens=call.end - call.start,
            finish=call.finish,
            occurrence=call.occurrence,
            ignored_settings=canonical(ignored).decode() if ignored else None,
        )


def _idle_before(calls: Sequence[Call], scheduled_ns: int) -> list[int]:
    """Return the ns without an open call before each call."""
    found = [0] * len(calls)
    busy_until_ns = scheduled_ns
    for number in sorted(range(len(calls)), key=lambda one: calls[one].asked_ns):
        found[number] = max(0, calls[number].asked_ns - busy_until_ns)
        busy_until_ns = max(busy_until_ns, calls[number].answered_ns)
    return found


def _rows(catalogue: Catalogue, bus: Bus, topics: Topics, damage: Damage) -> Iterator[CallRow]:
    by_partition: dict[int, dict[int, LoggedRecord]] = {}
    for (partition, offset), named in logged_records(catalogue, _WITH_CALLS).items():
        by_partition.setdefault(partition, {})[offset] = named
    for partition, left in by_partition.items():
        at = TopicPartition(topics.trajectories, partition)
        for record in _records(bus, at, left):
            if damage.is_sound(record, left.pop(record.offset)):
                with suppress(SchemaError):  # a dead letter
                    yield from call_rows(view_trajectory(record.value))
        damage.look_for_the_rest({(partition, offset): one for offset, one in left.items()})


def _records(bus: Bus, at: TopicPartition, wanted: Mapping[int, Any]) -> Iterator[Record]:
    with closing(bus.reader({at: min(wanted)})) as reader:
        for records in polls_until(reader, {at: max(wanted) + 1}):
            yield from (one for one in records if one.offset in wanted)

"""The table `calls`: agents' model calls, read from records for each statement that names it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import Damage, PlaceReader
from dora_pipe.core.errors import SchemaError
from dora_pipe.ledger.database import COUNTS, Catalogue, TableMissing, logged_records
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
    """Answer like `Catalogue.ask`, with `calls`; also return unreadable records. Raises BusError,
    UsageError, ResourceError."""
    damage = Damage()
    try:
        names, rows = catalogue.ask(sql, parameters)
    except TableMissing as missing:
        if missing.table != CALLS.name:
            raise
        catalogue.lay(CALLS, _rows(catalogue, bus, topics, damage))
        names, rows = catalogue.ask(sql, parameters)
    return names, rows, damage


def call_rows(record: Described) -> Iterator[CallRow]:
    """Yield a record's calls in order of their answers."""
    idle = _idle_before(record.meta.calls, record.meta.times.scheduled)
    for number, call in enumerate(record.meta.calls):
        context, prompt_tokens = place_of(call, record.meta.contexts)
        ignored = call.ignored_settings
        yield CallRow(
            trajectory_id=record.trajectory,
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
    idle_ns = [0] * len(calls)
    busy_until_ns = scheduled_ns
    for number in sorted(range(len(calls)), key=lambda index: calls[index].asked_ns):
        idle_ns[number] = max(0, calls[number].asked_ns - busy_until_ns)
        busy_until_ns = max(busy_until_ns, calls[number].answered_ns)
    return idle_ns


def _rows(catalogue: Catalogue, bus: Bus, topics: Topics, damage: Damage) -> Iterator[CallRow]:
    named = logged_records(catalogue, _WITH_CALLS).values()
    with closing(PlaceReader(bus, topics.trajectories)) as reader:
        for record, _ in reader.named(named, damage):
            with suppress(SchemaError):  # a dead letter
                yield from call_rows(view_trajectory(record.value))

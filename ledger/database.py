"""The catalogue as a DuckDB database.

A live table is two tables and a view: ended rows are appended, open rows rewritten. DuckDB is
imported on open and fetches nothing.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.ledger.tables import FORM, TABLE_OF, TABLES, Column, Row, Table, columns_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MEMORY_MAX: Final = "4GB"

COMPRESSED_ROWS: Final = 100_000
"""Rows per compression: a sixth of the memory, 0.1 s of work."""

LAID_ROWS: Final = 4096

QUIET: Final = "set enable_progress_bar = false"
"""It would write to stdout."""

VIEWS: Final = {
    "evaluations": """
        select version, evaluation, task, count(*) as groups, sum(results) as trajectories,
               sum(valid) as valid, sum(reward * valid) / nullif(sum(valid), 0) as reward,
               max(ended_ns) as ended_ns
        from groups where outcome = 'evaluated' group by version, evaluation, task
        order by version, evaluation""",
    "selection": """
        with late as (
            select trajectory_id, any_value(tokens) as tokens, any_value(reward) as reward
            from records group by trajectory_id
        ), impatient as (
            select group_id from groups where purpose = 'train' and redundancy > 0
            union select group_id from trajectories join groups using (group_id)
            where purpose = 'train' and trajectories.outcome is not null
        ), ended as (
            select coalesce(t.outcome, 'trained') as outcome,
                   coalesce(t.tokens, late.tokens) as tokens,
                   coalesce(t.reward, late.reward) as reward,
                   (coalesce(t.logged_ns, a.ended_ns) - t.scheduled_ns) / 1e9 as seconds
            from trajectories t join impatient using (group_id) join groups g using (group_id)
            left join attempts a on a.trajectory_id = t.trajectory_id and a.attempt = t.attempt
            left join late on late.trajectory_id = t.trajectory_id and t.outcome is not null
            where t.outcome is not null or (g.outcome = 'trained' and t.reward is not null)
        )
        select outcome, count(*) as trajectories, count(tokens) as tokens_count,
               avg(tokens) as tokens, 1.96 * stddev_samp(tokens) / sqrt(count(tokens))
                   as tokens_error, count(reward) as reward_count, avg(reward) as reward,
               1.96 * stddev_samp(reward) / sqrt(count(reward)) as reward_error,
               count(seconds) as seconds_count, avg(seconds) as seconds,
               1.96 * stddev_samp(seconds) / sqrt(count(seconds)) as seconds_error
        from ended group by outcome order by outcome = 'trained' desc, outcome desc""",
    "waits": """
        with waited as (
            select w.*, version, group_id, dispatched_ns, logged_ns, worker
            from (
                select step, 0 as part, coalesce(free_ns, taken_ns) as free_ns, taken_ns,
                       last_trajectory as trajectory_id
                from batches where attempt = 1 and step not in (select step from parts)
                union all select step, part, free_ns, taken_ns, last_trajectory from parts
            ) w join trajectories using (trajectory_id) join groups using (group_id)
        ), placed as (
            select step, part, a.attempt as place, a.scheduled_ns,
                   lag(a.worker) over (partition by step, part order by a.attempt) as held_by
            from waited join attempts a using (trajectory_id)
        ), changes as (
            select step, part, 0 as place, dispatched_ns as until_ns, 'admission' as kind,
                   null as worker
            from waited
            union all select step, part, place, scheduled_ns,
                             case when held_by is null then 'queue' else 'lost' end, held_by
            from placed
            union all select step, part, 1000000, logged_ns, 'sampling', worker from waited
            union all select step, part, 1000001, taken_ns, 'decision', null from waited
        ), pieces as (
            select step, part, place, kind, changes.worker, version,
                   greatest(free_ns, max(until_ns) over (
                       partition by step, part order by place
                       rows between unbounded preceding and 1 preceding)) as from_ns,
                   least(until_ns, taken_ns) as until_ns
            from changes join waited using (step, part)
            union all select step, part, -1, 'stopped', null, version, free_ns, taken_ns from waited
        ), unusable as (
            select p.step, p.part from pieces p join groups on purpose = 'train'
                and outcome in ('filtered', 'failed') and ended_ns between from_ns and until_ns
            where kind = 'admission' group by p.step, p.part
            having count(*) >= (select count(*) from groups t where t.step = p.step)
        ), lasted as (
            select p.*, coalesce(sum(greatest(0, least(p.until_ns, m.at_ns)
                       - greatest(p.from_ns, m.since_ns))) filter (m.kind is not null), 0)
                       as stopped_ns
            from pieces p left join marks m on m.kind = 'resumed' group by all
        ), left_over as (
            select *, case kind when 'stopped' then stopped_ns
                      else until_ns - from_ns - stopped_ns end as lasted_ns
            from lasted
        )
        select step, part, if(kind = 'admission' and (step, part) in (from unusable), 'unusable',
                              kind) as kind, worker, version, lasted_ns / 1e9 as seconds
        from left_over where lasted_ns > 0 order by step, part, place""",
}

_PLACE = "catalogue_source"


_NO_TABLE: Final = re.compile(r"Table with name (\w+) does not exist")
_HINT: Final = "docs/reference/sql.md lists the tables and their columns"


class TableMissing(UsageError):
    def __init__(self, message: str, table: str) -> None:
        super().__init__(message, hint=_HINT)
        self.table = table


class CatalogueSource(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    control_next: int
    decisions_next: int
    chain: str
    form: int = FORM


class Catalogue:
    """Tables of one run, for one thread. Example: ``catalogue.query("select count(*) from
    groups")``.

    Raises ResourceError for a query beyond its memory, UsageError for an invalid one.
    """

    def __init__(self, path: Path | None = None, *, threads: int = 1) -> None:
        """Create in memory, or open a saved file read-only."""
        import duckdb

        self._errors = duckdb.Error
        self._missing = duckdb.CatalogException
        self._schemas: dict[type[Row], Any] = {}
        self._memory = duckdb.OutOfMemoryException
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": threads,
            "memory_limit": MEMORY_MAX,
            "temp_directory": "",
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        if path is not None:
            self._db: DuckDBPyConnection = duckdb.connect(str(path), read_only=True, config=config)
            self._db.execute(QUIET)
            return
        self._db = duckdb.connect(":memory:", config=config)
        self._db.execute(QUIET)
        self._db.execute("attach ':memory:' as log (compress)")
        self._db.execute("use log")
        self._appended = 0
        for table in TABLES:
            self._create(table)
        for name, body in VIEWS.items():
            self._db.execute(f"create view {name} as {body}")
        self._db.execute(f"create table {_PLACE} (source JSON)")

    def append(self, rows: Iterable[Row]) -> None:
        for kind, kind_rows in _by_kind(rows).items():
            self._insert(kind, kind_rows, open_=False)
            self._appended += len(kind_rows)
        if self._appended >= COMPRESSED_ROWS:
            self._db.execute("checkpoint log")
            self._appended = 0

    def refresh(self, rows: Iterable[Row]) -> None:
        by_kind = _by_kind(rows)
        for table in TABLES:
            if table.live:
                self._db.execute(f"truncate log.{table.name}_open")
                self._insert(table.row, by_kind.get(table.row, []), open_=True)

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self.ask(sql, parameters)[1]

    def one(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        rows = self.query(sql, parameters)
        return rows[0] if rows else None

    def records(self, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        names, rows = self.ask(sql, parameters)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def ask(
        self, sql: str, parameters: Sequence[Any] = ()
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        try:
            cursor = self._db.execute(sql, list(parameters))
            names = [column[0] for column in cursor.description or ()]
            return names, [tuple(map(_plain, row)) for row in cursor.fetchall()]
        except self._memory as error:
            raise ResourceError(
                f"the query needs more memory than {MEMORY_MAX}: {_first_line(error)}",
                hint="ask for fewer columns, or for aggregates",
            ) from None
        except self._errors as error:
            message = f"the query cannot be answered: {_stated(error)}"
            missing = _NO_TABLE.search(message) if isinstance(error, self._missing) else None
            raise (
                UsageError(message, hint=_HINT)
                if missing is None
                else TableMissing(message, missing[1])
            ) from None

    @property
    def source(self) -> CatalogueSource | None:
        """Position in the log, if set."""
        row = self.one(f"select source from {_PLACE}")
        return msgspec.json.decode(row[0], type=CatalogueSource) if row else None

    def save(self, path: Path, source: CatalogueSource) -> None:
        """Save atomically. Raises ResourceError."""
        who = f"{os.getpid()}-{threading.get_ident()}"  # several threads may save
        unfinished = path.with_name(f".{path.name}.{who}.tmp")
        try:
            unfinished.unlink(missing_ok=True)
            self._db.execute(f"truncate {_PLACE}")
            encoded = msgspec.json.encode(source).decode()
            self._db.execute(f"insert into {_PLACE} values (?)", [encoded])
            name = str(unfinished).replace("'", "''")
            self._db.execute(f"attach '{name}' as saved")
            try:
                self._db.execute("copy from database log to saved")
            finally:
                self._db.execute("detach saved")
            unfinished.replace(path)
        except (OSError, self._errors) as error:
            raise ResourceError(f"cannot write {path}: {_first_line(error)}") from None
        finally:
            unfinished.unlink(missing_ok=True)
            unfinished.with_name(f"{unfinished.name}.wal").unlink(missing_ok=True)

    def close(self) -> None:
        self._db.close()

    def _create(self, table: Table) -> None:
        fields = ", ".join(_definition(column) for column in columns_of(table.row))
        if not table.live:
            self._db.execute(f"create table {table.name} ({fields})")
            return
        self._db.execute(f"create table {table.name}_ended ({fields})")
        self._db.execute(f"create table {table.name}_open ({fields})")
        both = f"from {table.name}_ended union all from {table.name}_open"
        self._db.execute(f"create view {table.name} as {both}")

    def lay(self, table: Table, rows: Iterator[Row]) -> None:
        """Replace a table by temporary rows, which are not saved."""
        fields = ", ".join(_definition(column) for column in columns_of(table.row))
        self._db.execute(f"create or replace temp table {table.name} ({fields})")
        while piece := list(islice(rows, LAID_ROWS)):
            self._pour(f"temp.{table.name}", table.row, piece)

    def _insert(self, kind: type[Row], rows: list[Row], *, open_: bool) -> None:
        table = TABLE_OF[kind]
        name = f"{table.name}{'_open' if open_ else '_ended'}" if table.live else table.name
        self._pour(f"log.{name}", kind, rows)

    def _pour(self, name: str, kind: type[Row], rows: Sequence[Row]) -> None:
        if not rows:
            return
        import pyarrow as pa

        schema = self._schemas.get(kind)
        if schema is None:
            schema = self._schemas[kind] = arrow_schema(kind)
        columns = zip(*map(msgspec.structs.astuple, rows), strict=True)
        arrays = [
            pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)
        ]
        self._db.register("incoming", pa.Table.from_arrays(arrays, schema=schema))
        try:
            self._db.execute(f"insert into {name} from incoming")
        finally:
            self._db.unregister("incoming")


def fresh_catalogue(path: Path, source: CatalogueSource) -> Catalogue | None:
    """Open a saved catalogue of exactly this form and position, else None."""
    if not path.is_file():
        return None
    import duckdb

    try:
        catalogue = Catalogue(path)
    except duckdb.Error:
        return None  # damaged or another DuckDB version
    try:
        if catalogue.source == source:
            return catalogue
    except (UsageError, msgspec.DecodeError):
        pass  # another form
    catalogue.close()
    return None


def _by_kind(rows: Iterable[Row]) -> dict[type[Row], list[Row]]:
    by_kind: dict[type[Row], list[Row]] = {}
    for row in rows:
        by_kind.setdefault(type(row), []).append(row)
    return by_kind


def _definition(column: Column) -> str:
    return f'"{column.name}" {column.sql}' + ("" if column.null else " not null")


def arrow_schema(row: type[Row]) -> Any:
    """Return the Arrow schema for appends and exports."""
    import pyarrow as pa

    kinds = {
        "BIGINT": pa.int64(),
        "INTEGER": pa.int32(),
        "SMALLINT": pa.int16(),
        "DOUBLE": pa.float64(),
        "BOOLEAN": pa.bool_(),
    }
    return pa.schema(
        [pa.field(column.name, kinds.get(column.sql, pa.string())) for column in columns_of(row)]
    )


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _stated(error: BaseException) -> str:
    """Return DuckDB's message without the query."""
    return "; ".join(str(error).strip().partition("\n\n")[0].splitlines())


COUNTS = "status = 'bound'"
"""The record counts for its group."""

_COLUMNS = (
    "trajectory_id as trajectory, attempt, incarnation, status, logged_ns, partition, "
    'record_offset as "offset", sha256'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRecord:
    trajectory: str
    attempt: int
    incarnation: int
    status: str
    """`bound` (counts), `superseded` or `fenced`."""
    logged_ns: int
    partition: int
    offset: int
    sha256: str


def logged_records(
    catalogue: Catalogue, where: str, parameters: Sequence[Any] = ()
) -> dict[tuple[int, int], LoggedRecord]:
    """Return records by place; `where` is a condition on `records`."""
    order = "order by partition, record_offset"
    rows = catalogue.records(f"select {_COLUMNS} from records where {where} {order}", parameters)
    return {(row["partition"], row["offset"]): LoggedRecord(**row) for row in rows}


def counting_record(catalogue: Catalogue, trajectory: str) -> LoggedRecord | None:
    records = logged_records(catalogue, f"{COUNTS} and trajectory_id = ?", [trajectory])
    return next(reversed(records.values()), None)

"""Export trajectories as Parquet and a policy as a model directory."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import Damage, logged_trajectory
from dora_pipe.config.model import Config
from dora_pipe.consumers.contributions import SCHEMA as CONTRIBUTIONS
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.core.errors import PolicyError, SchemaError, UsageError
from dora_pipe.core.pure.records import Record
from dora_pipe.ledger.database import COUNTS, Catalogue, arrow_schema, logged_records
from dora_pipe.ledger.tables import TrajectoryRow
from dora_pipe.orchestrator import watched
from dora_pipe.schemas.contexts import Context, context_at
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory, answer_of
from dora_pipe.schemas.trajectory_codec import TRAJECTORY
from dora_pipe.store.model_dir import export_model
from dora_pipe.store.store import PolicyStore, as_store

ROW: Final = "row_"
"""Prefix of data columns."""

JSON: Final = pa.large_utf8()
"""Lists, objects and mixed types, as JSON."""

TURN: Final = pa.struct(
    [("kind", pa.utf8()), ("turn", pa.int32()), ("context", pa.int32()), ("text", pa.utf8())]
)
"""`turn` counts within its context."""

FIELDS: Final = (
    pa.field("prompt", pa.utf8()),
    pa.field("turns", pa.list_(TURN)),
    pa.field("answer", pa.utf8()),
)

_KINDS: Final[tuple[tuple[type, pa.DataType], ...]] = (
    (bool, pa.bool_()),
    (int, pa.int64()),
    (float, pa.float64()),
    (str, pa.utf8()),
)


class Words(Protocol):
    def text(self, token_ids: Sequence[int]) -> str: ...

    def full_text(self, token_ids: Sequence[int]) -> str: ...


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TextColumns:
    words: Words | None = None
    data: Mapping[str, Rows] = field(default_factory=dict)

    def fields(self) -> list[pa.Field]:
        kinds_by_name: dict[str, set[type]] = {}
        for rows in self.data.values():
            for row in rows:
                for name, value in row.items():
                    if value is not None:
                        kinds_by_name.setdefault(name, set()).add(_kind(value))
        return [
            *FIELDS,
            *(pa.field(ROW + name, _type(kinds)) for name, kinds in kinds_by_name.items()),
        ]

    def columns(self, trajectory: Trajectory, types: Mapping[str, pa.DataType]) -> dict[str, Any]:
        texts = {} if self.words is None else _texts(trajectory, self.words)
        rows = self.data.get(trajectory.meta.dataset_digest, ())
        index = trajectory.meta.index
        row = rows[index] if 0 <= index < len(rows) else {}
        return texts | {
            ROW + name: _cell(value, types[ROW + name])
            for name, value in row.items()
            if ROW + name in types
        }


def _texts(trajectory: Trajectory, words: Words) -> dict[str, Any]:
    ids, contexts = trajectory.token_ids, trajectory.meta.contexts
    turns = []
    for (kind, turn), of in groupby(
        trajectory.segments, lambda segment: (segment.kind, segment.turn)
    ):
        pieces = list(of)
        start, end = pieces[0].start, pieces[-1].end
        if kind == "prompt" and start == end:
            continue
        turns.append((kind, turn, context_at(contexts, start), ids[start:end]))
    sampled = [tokens for kind, _, _, tokens in turns if kind == "model"]
    return {
        "prompt": words.full_text(ids[: trajectory.meta.prompt_tokens]),
        "turns": [
            {"kind": kind, "turn": turn, "context": context, "text": words.full_text(tokens)}
            for kind, turn, context, tokens in turns
            if kind != "prompt" or context
        ],
        "answer": words.text(answer_of(trajectory)) if sampled else None,
    }


def _kind(value: Any) -> type:
    """Return the type; `object` for integers beyond 64 bits."""
    if type(value) is int and not -(2**63) <= value < 2**63:
        return object
    return type(value)


def _type(kinds: set[type]) -> pa.DataType:
    if kinds == {int, float}:
        return pa.float64()
    return next((arrow for kind, arrow in _KINDS if kinds == {kind}), JSON)


def _cell(value: Any, kind: pa.DataType) -> Any:
    if value is None or kind != JSON:
        return value
    return json.dumps(value, ensure_ascii=False)


NO_TEXTS: Final = TextColumns()

ENDED: Final = """
    select g.version, list(t.reward order by t.sample)
    from groups_ended g join trajectories t using (group_id)
    where g.outcome = 'evaluated' and g.evaluation = ?
    group by g.rowid, g.version order by g.rowid
"""
"""Groups of an evaluation by end."""

LOGGED: Final = """
    select version, reward from evaluations
    where evaluation = ? and reward is not null
    qualify groups = max(groups) over () order by reward desc, version
"""

ROWS_PER_GROUP: Final = 1024

STEPS_HELD_MAX: Final = 32
"""Open contributions files; groups are roughly in step order."""

_ARRAYS: Final = ("token_ids", "logprobs", "sampler_logprobs", "loss_mask", "segments")
_SHARED: Final = ("trajectory", "group", "version", "staleness", "reward", "tokens")
_CONTRIBUTED: Final = tuple(name for name in CONTRIBUTIONS.names if name not in _SHARED)


DECIDED: Final = """
    select records.partition, records.record_offset as "offset", status, ordinal, sha256,
           coalesce(trajectories.outcome, groups.outcome) as outcome, end_reason,
           records.logged_ns, dispatched_ns, trajectories.reward as counts,
           case when status = 'bound' and groups.outcome = 'trained' then step end as step,
           case when status = 'bound' and groups.outcome = 'trained' then groups.part end as part,
           case when status = 'bound' then staleness end as staleness, {more}
    from records join trajectories using (trajectory_id) join groups using (group_id)"""
"""Columns from control and decisions."""


def _fields(kind: pa.DataType, *names: str) -> list[pa.Field]:
    return [pa.field(name, kind) for name in names]


BRANCH: Final = pa.struct([(name, pa.int32()) for name in Context.__struct_fields__])

SCHEMA: Final = pa.schema(
    [
        *_fields(pa.utf8(), "run", "trajectory", "group", "purpose", "status"),
        *_fields(pa.int64(), "ordinal", "sample", "group_size", "attempt"),
        *_fields(pa.int64(), "version", "deadline"),
        *_fields(pa.utf8(), "weights_digest", "worker"),
        *_fields(pa.int64(), "incarnation", "partition", "offset"),
        *_fields(pa.utf8(), "sha256", "outcome", "end_reason"),
        *_fields(pa.int64(), "step", "part", "staleness"),
        *_fields(pa.utf8(), "dataset_digest"),
        *_fields(pa.int64(), "index", "data_epoch", "seed"),
        *_fields(pa.utf8(), "finish", "error"),
        *_fields(pa.float64(), "reward", "reward_raw"),
        *_fields(pa.utf8(), "reward_parts", "reward_error"),
        *_fields(pa.int64(), "prompt_tokens", "tokens", "sampled"),
        *(TRAJECTORY.schema.field(name).with_nullable(True) for name in _ARRAYS),
        pa.field("prefills", pa.list_(pa.int32())),
        pa.field("branches", pa.list_(BRANCH)),
        *_fields(pa.int64(), "dispatched_ns", "scheduled_ns", "started_ns", "first_token_ns"),
        *_fields(pa.int64(), "finished_ns", "rewarded_ns", "logged_ns"),
        *(CONTRIBUTIONS.field(name).with_nullable(True) for name in _CONTRIBUTED),
    ]
)
"""One row per trajectory, times in ns: `dispatched_ns` by the round clock, others by wall clocks.
Null: it did not happen.
"""

SAID_OTHERWISE: Final = frozenset({"trajectory_id", "group_id", "record_offset"})
"""Catalogue columns with another name in `SCHEMA`."""


def more_fields() -> list[pa.Field]:
    """Return the catalogue's other trajectory columns."""
    exported = SAID_OTHERWISE.union(SCHEMA.names)
    return [column for column in arrow_schema(TrajectoryRow) if column.name not in exported]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    rows: int
    bytes: int
    left_out: int
    damage: Damage


def export_parquet(
    bus: Bus,
    topics: Topics,
    catalogue: Catalogue,
    store: PolicyStore | Path | None,
    path: Path,
    *,
    everything: bool = False,
    texts: TextColumns = NO_TEXTS,
) -> ExportResult:
    """Write one row per trajectory that counts, or `everything`.

    Damaged records are left out. Replaces an existing file atomically.
    """
    schema = pa.schema([*SCHEMA, *more_fields(), *texts.fields()])
    where = "true" if everything else COUNTS
    rows = _Rows(catalogue, None if store is None else as_store(store), where, texts, schema)
    unfinished = path.with_name(f".{path.name}.tmp")
    written = 0
    try:
        with pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
            records = records_of(bus, ends_of(bus, topics.trajectories))
            for table in _tables(rows.of(records), schema):
                writer.write_table(table)
                written += table.num_rows
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return ExportResult(
        rows=written, bytes=path.stat().st_size, left_out=rows.left_out, damage=rows.damage
    )


def export_policy(
    catalogue: Catalogue, store: PolicyStore | Path, version: int, directory: Path
) -> str:
    """Write a version for `from_pretrained`; return its weights digest. Raises UsageError for an
    unpublished version, PolicyError for missing files."""
    published = dict(catalogue.query("select version, digest from versions"))
    run = catalogue.one("select assets_digest from runs")
    if version not in published or run is None:
        raise UsageError(
            f"version {version} was not published",
            hint=f"there are versions 0 to {max(published, default=-1)}",
        )
    digest: str = published[version]
    export_model(as_store(store), digest, run[0], directory)
    return digest


def best_version(catalogue: Catalogue, config: Config) -> tuple[int, float] | None:
    """Return the best version and its metric by the watched evaluation; None without one.

    Sums are in fold order, so that ties agree with the orchestrator's.
    """
    evaluation = watched.watched_evaluation(config)
    if evaluation is None:
        return None
    rows = catalogue.query(ENDED, [evaluation.name])
    groups = Counter(version for version, _ in rows)
    watching = watched.Watched(
        open=tuple(watched.Evaluated(version=version) for version in sorted(groups))
    )
    for version, rewards in rows:
        valid = [reward for reward in rewards if reward is not None]
        watching = watched.ended(watching, version, valid, groups=max(groups.values()))
    return (watching.best, watching.reward) if watching.best >= 0 else None


def logged_versions(catalogue: Catalogue, evaluation: str) -> list[tuple[int, float]]:
    """Return (version, mean valid reward) of evaluations with all prompts, best first."""
    return catalogue.query(LOGGED, [evaluation])


def _tables(rows: Iterator[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.Table]:
    held: list[dict[str, Any]] = []
    for row in rows:
        held.append(row)
        if len(held) == ROWS_PER_GROUP:
            yield pa.Table.from_pylist(held, schema=schema)
            held = []
    if held:
        yield pa.Table.from_pylist(held, schema=schema)


class _Rows:
    def __init__(
        self,
        catalogue: Catalogue,
        store: PolicyStore | None,
        where: str,
        texts: TextColumns,
        schema: pa.Schema,
    ) -> None:
        self._texts = texts
        self._types = {column.name: column.type for column in schema}
        self._store = store
        self._wanted = logged_records(catalogue, where)
        more = ", ".join(f"trajectories.{column.name}" for column in more_fields())
        decided = DECIDED.format(more=more)
        self._decided = {
            (row["partition"], row["offset"]): row
            for row in catalogue.records(f"{decided} where {where}")
        }
        self._files = dict(catalogue.query("select step, contributions from steps"))
        self._contributions: OrderedDict[int, dict[str, dict[str, Any]]] = OrderedDict()
        self.left_out = 0
        self.damage = Damage()

    def of(self, records: Iterator[Record]) -> Iterator[dict[str, Any]]:
        for record in records:
            key = (record.partition, record.offset)
            logged = self._wanted.pop(key, None)
            if logged is None:
                self.left_out += 1
                continue
            if not self.damage.is_sound(record, logged):
                continue
            try:
                trajectory = logged_trajectory(record, logged)
            except SchemaError:
                self.left_out += 1
                continue
            yield self._row(trajectory, self._decided[key])
        self.damage.look_for_the_rest(self._wanted)

    def _row(self, trajectory: Trajectory, decided: dict[str, Any]) -> dict[str, Any]:
        row = _about(trajectory) | decided | self._texts.columns(trajectory, self._types)
        if decided["status"] == "bound":  # from group scoring
            row["reward"] = decided["counts"]
        if decided["step"] is not None:
            of_step = self._of_step(decided["step"]).get(trajectory.trajectory, {})
            row |= {name: of_step.get(name) for name in _CONTRIBUTED}
        return row

    def _of_step(self, step: int) -> dict[str, dict[str, Any]]:
        if self._store is None:
            return {}
        if step not in self._contributions:
            sha256 = self._files[step]
            path = self._store.blob("contributions", sha256)
            if not path.is_file():
                raise PolicyError(f"no contributions of step {step} at {path}")
            rows = read_contributions(path)
            self._contributions[step] = {row["trajectory"]: row for row in rows}
            if len(self._contributions) > STEPS_HELD_MAX:
                self._contributions.popitem(last=False)
        return self._contributions[step]


def _about(trajectory: Trajectory) -> dict[str, Any]:
    meta, times = trajectory.meta, trajectory.meta.times
    same = ("run", "group", "purpose", "group_size", "attempt", "deadline", "worker")
    also = ("dataset_digest", "index", "data_epoch", "seed", "finish", "error")
    more = ("reward_raw", "reward_error", "prompt_tokens")
    return {
        "trajectory": trajectory.trajectory,
        "version": trajectory.version,
        "weights_digest": trajectory.digest,
        "sample": meta.sample,
        "incarnation": meta.incarnation,
        "reward": trajectory.reward,
        "reward_parts": msgspec.json.encode(meta.reward_parts).decode(),
        "tokens": len(trajectory.token_ids),
        "sampled": trajectory.sampled,
        "segments": [msgspec.structs.asdict(segment) for segment in trajectory.segments],
        "prefills": list(meta.prefills),
        "branches": [msgspec.structs.asdict(context) for context in meta.contexts],
        **{name: getattr(trajectory, name) for name in _ARRAYS if name != "segments"},
        **{name: getattr(meta, name) for name in (*same, *also, *more)},
        "scheduled_ns": times.scheduled,
        **{f"{name}_ns": getattr(times, name) for name in times.__struct_fields__},
    }

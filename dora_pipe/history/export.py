"""Hands a run to other tools: trajectories as Parquet, a policy as a model directory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from dora_pipe.bus.port import Bus, Record
from dora_pipe.consumers.contributions import SCHEMA as CONTRIBUTIONS
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.errors import PolicyError, SchemaError, UsageError
from dora_pipe.history.audit import build_ledger
from dora_pipe.history.entries import GroupEntry, Logged, VersionEntry
from dora_pipe.history.ledger import Ledger
from dora_pipe.history.reading import ends_of, records_of
from dora_pipe.policies.store import PolicyStore, as_store
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import TRAJECTORY, decode_trajectory

ROWS_PER_GROUP: Final = 1024
"""Trajectories in one Parquet row group; so many are in memory at a time."""

STEPS_HELD_MAX: Final = 32
"""Contributions files held at a time: groups lie in the log roughly in the order of their steps."""

_ARRAYS: Final = ("token_ids", "logprobs", "sampler_logprobs", "loss_mask", "segments")
_CONTRIBUTED: Final = (
    "advantage",
    "ratio_mean",
    "ratio_min",
    "ratio_max",
    "clipped_share",
    "kl",
    "loss_share",
    "minibatch",
    "micro_batch",
    "weight_mean",
    "masked_share",
)
"""Columns of the contributions file that a trained trajectory carries over."""


def _fields(kind: pa.DataType, *names: str) -> list[pa.Field]:
    return [pa.field(name, kind) for name in names]


SCHEMA: Final = pa.schema(
    [
        *_fields(pa.utf8(), "run", "trajectory", "group", "purpose", "standing"),
        *_fields(pa.int64(), "ordinal", "sibling", "group_size", "attempt"),
        *_fields(pa.int64(), "version", "deadline"),
        *_fields(pa.utf8(), "weights_digest", "worker"),
        *_fields(pa.int64(), "epoch", "partition", "offset"),
        *_fields(pa.utf8(), "sha256", "fate", "why"),
        *_fields(pa.int64(), "step", "staleness"),
        *_fields(pa.utf8(), "dataset_digest"),
        *_fields(pa.int64(), "index", "data_epoch", "seed"),
        *_fields(pa.utf8(), "finish", "error"),
        *_fields(pa.float64(), "reward", "reward_raw"),
        *_fields(pa.utf8(), "reward_parts", "reward_error"),
        *_fields(pa.int64(), "prompt_tokens", "tokens", "sampled"),
        *(TRAJECTORY.schema.field(name).with_nullable(True) for name in _ARRAYS),
        pa.field("prefills", pa.list_(pa.int32())),
        *_fields(pa.int64(), "dispatched_ns", "placed_ns", "started_ns", "first_token_ns"),
        *_fields(pa.int64(), "finished_ns", "rewarded_ns", "logged_ns"),
        *(CONTRIBUTIONS.field(name).with_nullable(True) for name in _CONTRIBUTED),
    ]
)
"""One row per trajectory. `dispatched_ns` is the orchestrator's round clock, the rest wall clocks;
all in ns. What is null did not happen: a trajectory that was not trained has no step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote."""

    rows: int
    bytes: int
    left_out: int
    """Records that do not count, or could not be read."""


def export_parquet(
    bus: Bus,
    topics: Topics,
    store: PolicyStore | Path | None,
    path: Path,
    *,
    everything: bool = False,
) -> Exported:
    """Write one row per trajectory that counts for its group; `everything`: also those that do not.

    Raises UsageError when the file is there already.
    """
    if path.exists():
        raise UsageError(f"{path} is there already", hint="choose another name, or remove it")
    ledger = build_ledger(bus, topics)
    rows = _Rows(ledger, None if store is None else as_store(store), everything)
    unfinished = path.with_name(f".{path.name}.tmp")
    written = 0
    try:
        with pq.ParquetWriter(unfinished, SCHEMA, compression="zstd") as writer:
            for table in _tables(rows.of(records_of(bus, ends_of(bus, topics.trajectories)))):
                writer.write_table(table)
                written += table.num_rows
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return Exported(rows=written, bytes=path.stat().st_size, left_out=rows.left_out)


def export_policy(
    bus: Bus, topics: Topics, store: PolicyStore | Path, version: int, directory: Path
) -> str:
    """Write a version as a directory that `from_pretrained` loads; its weights digest.

    Raises UsageError for a version that was not published, PolicyError when its files are gone.
    """
    ledger = build_ledger(bus, topics)
    entry: VersionEntry | None = ledger.versions.get(version)
    if entry is None or ledger.started is None:
        raise UsageError(
            f"version {version} was not published",
            hint=f"there are versions 0 to {ledger.version}",
        )
    digest: str = entry.digest
    as_store(store).export_policy(digest, ledger.started.assets_digest, directory)
    return digest


def _tables(rows: Iterator[dict[str, Any]]) -> Iterator[pa.Table]:
    held: list[dict[str, Any]] = []
    for row in rows:
        held.append(row)
        if len(held) == ROWS_PER_GROUP:
            yield pa.Table.from_pylist(held, schema=SCHEMA)
            held = []
    if held:
        yield pa.Table.from_pylist(held, schema=SCHEMA)


class _Rows:
    """Makes rows of records; holds the contributions of a few steps."""

    def __init__(self, ledger: Ledger, store: PolicyStore | None, everything: bool) -> None:
        self._ledger = ledger
        self._store = store
        self._everything = everything
        self._contributions: OrderedDict[int, dict[str, dict[str, Any]]] = OrderedDict()
        self._files = {
            entry.step: entry.fact.contributions.sha256 for entry in ledger.steps.values()
        }
        self.left_out = 0

    def of(self, records: Iterator[Record]) -> Iterator[dict[str, Any]]:
        """Rows, in the order of the log."""
        for record in records:
            logged = self._ledger.accounts.logged.get((record.partition, record.offset))
            if logged is None or not (self._everything or logged.standing == "bound"):
                self.left_out += 1
                continue
            try:
                trajectory = decode_trajectory(record.value)
            except SchemaError:
                self.left_out += 1
                continue
            yield self._row(trajectory, logged)

    def _row(self, trajectory: Trajectory, logged: Logged) -> dict[str, Any]:
        group = self._ledger.accounts.groups[group_of(trajectory.trajectory)]
        row = _about(trajectory) | _ledger_columns(logged, group)
        if group.step is not None and logged.standing == "bound":
            of_step = self._of_step(group.step).get(trajectory.trajectory, {})
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
    """What the record itself says."""
    meta, times = trajectory.meta, trajectory.meta.times
    same = ("run", "group", "purpose", "sibling", "group_size", "attempt", "deadline", "worker")
    also = ("epoch", "dataset_digest", "index", "data_epoch", "seed", "finish", "error")
    more = ("reward_raw", "reward_error", "prompt_tokens")
    return {
        "trajectory": trajectory.trajectory,
        "version": trajectory.version,
        "weights_digest": trajectory.digest,
        "reward": trajectory.reward,
        "reward_parts": msgspec.json.encode(meta.reward_parts).decode(),
        "tokens": len(trajectory.token_ids),
        "sampled": trajectory.sampled,
        "segments": [
            {name: getattr(segment, name) for name in segment.__dataclass_fields__}
            for segment in trajectory.segments
        ],
        "prefills": list(meta.prefills),
        **{name: getattr(trajectory, name) for name in _ARRAYS if name != "segments"},
        **{name: getattr(meta, name) for name in (*same, *also, *more)},
        **{f"{name}_ns": getattr(times, name) for name in times.__struct_fields__},
    }


def _ledger_columns(logged: Logged, group: GroupEntry) -> dict[str, Any]:
    """What the rest of the log says of it."""
    step = group.step if logged.standing == "bound" else None
    return {
        "standing": logged.standing,
        "ordinal": group.spec.ordinal,
        "partition": logged.fact.partition,
        "offset": logged.fact.offset,
        "sha256": logged.fact.sha256,
        "fate": group.fate or "open",
        "why": group.why,
        "step": step,
        "staleness": None if step is None else staleness_of(step, group.spec.version),
        "dispatched_ns": group.at.now_ns,
        "logged_ns": logged.fact.at_ns,
    }

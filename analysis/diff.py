"""Find the first record in which two runs differ, and possible reasons.

Groups are matched by dispatch order, since timing changes which one ends first; batches and
versions by number; trajectories by id, if weights and row are equal. The first record is the one
that the first run logged earliest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from dora_pipe.audit.reading import trajectories_of
from dora_pipe.bus.logged import Damage
from dora_pipe.config.load import leaves
from dora_pipe.config.logged import logged_config
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.ledger.database import COUNTS, logged_records
from dora_pipe.ledger.marks import SETTINGS
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.wire import sha256_hex

Kind = Literal["group", "batch", "version", "trajectory"]

MADE_OF: Final = (
    "seed",
    "planner",
    "package",
    "dataset_digest",
    "dataset_rows",
    "eval_digest",
    "eval_rows",
    "assets_digest",
)

WORKERS: Final = """
    select count(distinct worker) as workers,
           string_agg(distinct engine || ' ' || engine_version, ', ') as engines,
           string_agg(distinct device || ' ' || dtype, ', ') as computed_on,
           string_agg(distinct reward_digest, ', ') as reward_digest,
           string_agg(distinct template_digest, ', ') as template_digest from workers"""

RECORDS: Final[Mapping[Kind, str]] = {
    "group": """select ordinal, dispatched_ns, 'row ' || row || ' under version ' || version
        from groups where purpose = 'train'""",
    "batch": """select step, max(taken_ns), string_agg(group_id, ' ' order by group_id)
        from groups where outcome = 'trained' group by step""",
    "version": "select version, published_ns, digest from versions",
}

Records = Mapping[int | str, tuple[int, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    config: Mapping[str, Any]
    """By dotted key."""
    made_of: Mapping[str, Any]
    changes: Sequence[tuple[int, str]]
    """(step, change) of settings."""
    records: Mapping[Kind, Records]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    kind: Kind
    name: str
    at_ns: int
    values: tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiff:
    changes: tuple[Sequence[tuple[int, str]], Sequence[tuple[int, str]]]
    """(step, change) of each run; empty if equal."""
    config: Mapping[str, tuple[Any, Any]]
    made_of: Mapping[str, tuple[Any, Any]]
    """Differing seeds, versions, digests, engines and devices."""
    partings: Sequence[Parting]
    compared: Mapping[Kind, int]

    def reasons(self, names: tuple[str, str]) -> list[str]:
        mid_run = [
            f"{name} changed {change} at step {step}"
            for name, changes in zip(names, self.changes, strict=True)
            for step, change in changes
        ]
        pairs = [*self.config.items(), *self.made_of.items()]
        settings = [
            f"{key}: {first} and {other}" for key, (first, other) in pairs if key != "run.name"
        ]
        return mid_run + settings

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def diff_runs(first: OpenRun, other: OpenRun, damage: Damage) -> RunDiff:
    """Compare two logs completely. Raises BusError, LogTruncated."""
    return compare(_compared_run(first, damage), _compared_run(other, damage))


def compare(first: ComparedRun, other: ComparedRun) -> RunDiff:
    partings = [
        difference
        for kind in first.records
        if (difference := parting(kind, first.records[kind], other.records[kind])) is not None
    ]
    same = first.changes == other.changes
    return RunDiff(
        changes=((), ()) if same else (first.changes, other.changes),
        config=_differing(first.config, other.config),
        made_of=_differing(first.made_of, other.made_of),
        partings=sorted(partings, key=lambda parting: parting.at_ns),
        compared={
            kind: len(comparable(kind, records, other.records[kind]))
            for kind, records in first.records.items()
        },
    )


def comparable(kind: Kind, first: Records, other: Records) -> list[int | str]:
    """Return common records in the first run's order; trajectories need equal weights and rows."""
    both = (name for name in first if name in other)
    if kind == "trajectory":
        both = (name for name in both if first[name][1][0] == other[name][1][0])
    return sorted(both, key=lambda name: (first[name][0], name))


def parting(kind: Kind, first: Records, other: Records) -> Parting | None:
    """Return the first comparable record that differs, if any."""
    for name in comparable(kind, first, other):
        (at_ns, here), (_, there) = first[name], other[name]
        if here != there:
            return Parting(kind=kind, name=str(name), at_ns=at_ns, values=(here, there))
    return None


def _compared_run(run: OpenRun, damage: Damage) -> ComparedRun:
    with closing(run.tables()) as tables:
        ((config,),) = tables.query("select config from runs")
        (row,), (workers,) = tables.records("select * from runs"), tables.records(WORKERS)
        records: dict[Kind, Records] = {
            kind: {number: (at_ns, content) for number, at_ns, content in tables.query(query)}
            for kind, query in RECORDS.items()
        }
        changes = tables.query(SETTINGS)
        logged_ns = dict(
            tables.query(f"select trajectory_id, logged_ns from records where {COUNTS}")
        )
        counting = logged_records(tables, COUNTS)
    trajectories: Records = {
        each.trajectory: (logged_ns[each.trajectory], _content(each))
        for each in trajectories_of(run.bus, run.topics, counting.values(), damage)
    }
    folder = run.directory.path.resolve()
    settings = leaves(logged_config(msgspec.json.decode(config)))
    return ComparedRun(
        config={key: in_folder(value, folder) for key, value in settings.items()},
        made_of={**{key: row[key] for key in MADE_OF}, **workers},
        changes=[(step, change) for step, change in changes],
        records={**records, "trajectory": trajectories},
    )


def in_folder(value: Any, folder: Path) -> Any:
    """Return a path in the run's own folder relative to it: its content is compared, not its
    place."""
    if isinstance(value, str) and Path(value).is_relative_to(folder):
        return str(Path(value).relative_to(folder))
    return value


def _content(trajectory: Trajectory) -> tuple[tuple[Any, ...], str, float | None]:
    meta = trajectory.meta
    tokens = np.asarray(trajectory.token_ids, "<i8").tobytes()
    return (
        (trajectory.digest, meta.purpose, meta.index, meta.source),
        sha256_hex(tokens),
        trajectory.reward,
    )


def _differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = ((key, (first.get(key), other.get(key))) for key in sorted({*first, *other}))
    return {key: pair for key, pair in pairs if pair[0] != pair[1]}

"""Decides what the run of `dora-pipe sim scale` costs, from what was counted and measured: pure.

Rates are of decimal bytes per second, times in seconds.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Final

from dora_pipe.bench.scale.cluster import ScaleRun
from dora_pipe.bench.scale.measure import Sizes, SnapshotFigure, Speeds
from dora_pipe.bench.scale.size import (
    BROKER_BYTES_S,
    DAY_S,
    LEASE_S,
    LONGCAT,
    PARTITION_BYTES_S,
    REPLICATION,
    Size,
)
from dora_pipe.bus.port import Reader
from dora_pipe.core.runtime import BUS_TURN_NS
from dora_pipe.orchestrator.snapshots import BODY_BYTES_MAX, SNAPSHOT_EVERY
from dora_pipe.schemas.routes import ROUTES_BYTES_MAX
from dora_pipe.schemas.wire import RECORD_BYTES_MAX

ROUNDS_S: Final = 1e9 / BUS_TURN_NS
"""Rounds that the orchestrator appends in a second, at most."""
RECORDS_POLLED: Final[int] = inspect.signature(Reader.poll).parameters["records_max"].default
"""That one turn of the bus brings, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One topic."""

    topic: str
    records_s: float
    record_bytes: float
    partitions: int = 1
    readers: int = 1
    """Roles that read all of it while the run goes on."""
    keep_days: float | None = None
    """How long brokers keep it; None: as long as the run."""

    @property
    def bytes_s(self) -> float:
        """From those who write it, once."""
        return self.records_s * self.record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a run did per second, and in one step."""

    step_s: float
    trajectories_s: float
    tokens_s: float
    control_s: float
    control_bytes: float
    """Of one record on average, manifests of versions with them."""
    decisions_s: float
    """Rounds: one each turn of the bus that brings something, which the model's are longer than."""
    decision_bytes: float
    control_largest: int
    """Of a commit, with its manifest."""
    decision_largest: int


def rates_of(run: ScaleRun, sizes: Sizes) -> Rates:
    """After the first commit."""
    spans, seconds, control = run.run.spans, run.seconds, run.folded
    commits = run.control["step-committed"]
    manifests = commits.records * sizes.manifest
    control_s, decisions_s = control.records / seconds, run.decisions.records / seconds
    rounds_s = max(decisions_s, busy_turns_s(control_s))
    written_s = run.decisions.bytes / seconds + (rounds_s - decisions_s) * sizes.empty_round
    return Rates(
        step_s=(spans[-1].committed_s - spans[0].committed_s) / max(1, len(spans) - 1),
        trajectories_s=run.trajectories / seconds,
        tokens_s=run.tokens / seconds,
        control_s=control_s,
        control_bytes=(control.bytes + manifests) / control.records,
        decisions_s=rounds_s,
        decision_bytes=written_s / rounds_s,
        control_largest=commits.largest + sizes.manifest,
        decision_largest=run.decisions.largest,
    )


def busy_turns_s(records_s: float) -> float:
    """Turns of the bus that bring something, where so many records come at any time."""
    return ROUNDS_S * -math.expm1(-records_s / ROUNDS_S)


def flows(size: Size, sizes: Sizes, rates: Rates) -> list[Flow]:
    """Every topic. Workers read decisions, the trainer decisions and trajectories, the orchestrator
    control and metrics."""
    found = [
        Flow(topic="control", records_s=rates.control_s, record_bytes=rates.control_bytes),
        Flow(
            topic="decisions",
            records_s=rates.decisions_s,
            record_bytes=rates.decision_bytes,
            readers=size.workers + 1,
        ),
        Flow(
            topic="metrics",
            records_s=size.workers * sizes.statuses_s,
            record_bytes=sizes.status,
            keep_days=7.0,
        ),
        Flow(
            topic="progress",
            records_s=rates.tokens_s / size.checkpoint_tokens,
            record_bytes=sizes.progress,
            readers=0,
            keep_days=size.keep_days,
        ),
        Flow(
            topic="trajectories",
            records_s=rates.trajectories_s,
            record_bytes=sizes.trajectory,
            keep_days=size.keep_days,
        ),
    ]
    return found


def partitions_of(flow: Flow) -> int:
    """That a topic of several needs."""
    return max(1, math.ceil(flow.bytes_s / PARTITION_BYTES_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class Brokers:
    """What all topics together take."""

    count: int
    taken_bytes_s: float
    """With copies."""
    given_bytes_s: float
    """To readers."""
    kept_bytes: float
    """On all disks, of a run of a week."""


def brokers_of(every: list[Flow]) -> Brokers:
    """As many as take what is written, or give what is read: one copy does both at a time."""
    taken = REPLICATION * sum(one.bytes_s for one in every)
    given = sum(one.bytes_s * one.readers for one in every)
    count = max(REPLICATION, math.ceil(taken / BROKER_BYTES_S), math.ceil(given / BROKER_BYTES_S))
    week = 7.0
    kept = sum(one.bytes_s * DAY_S * min(week, one.keep_days or week) for one in every)
    return Brokers(
        count=count, taken_bytes_s=taken, given_bytes_s=given, kept_bytes=REPLICATION * kept
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """How a version comes to all workers: seconds of each part, one after the other."""

    way: str
    bytes: float
    publish_s: float
    """Until the trainer has hashed, compared and written it."""
    fetch_s: float
    """Until the last worker has the file."""
    make_s: float
    """Until it is made, hashed and on the disk there."""
    load_s: float
    """Into the accelerators."""

    @property
    def worker_s(self) -> float:
        """Of one worker."""
        return self.fetch_s + self.make_s + self.load_s


def hostings(size: Size, speeds: Speeds) -> list[Hosting]:
    """Whole and as a patch, from the store and from peers."""
    whole, patch = size.whole_bytes, size.patch_bytes
    disk, link = size.disk_gb_s * 1e9, size.link_gb_s * 1e9
    hash_s = whole / (speeds.hash_bytes_s * size.threads)
    written_s = max(hash_s, whole / disk)
    compare_s = whole / (speeds.compare_bytes_s * size.threads)
    make_s = max(whole / (speeds.apply_bytes_s * size.threads) + hash_s, whole / disk)
    load_s = whole / (size.gpus_per_worker * size.gpu_gb_s * 1e9)
    doublings = math.ceil(math.log2(size.workers + 1))
    found = []
    for way, count, publish_s, made_s in (
        ("whole", whole, written_s, written_s),
        ("patch", patch, written_s + compare_s, make_s),
    ):
        shared_s = size.workers * count / (size.store_gb_s * 1e9)
        for source, fetch_s in (
            ("store", max(shared_s, count / link)),
            ("peers", doublings * count / link),
        ):
            found.append(
                Hosting(
                    way=f"{way}, {source}",
                    bytes=count,
                    publish_s=publish_s,
                    fetch_s=fetch_s,
                    make_s=made_s,
                    load_s=load_s,
                )
            )
    return found


def stored_bytes_day(size: Size, step_s: float, whole_every: int) -> float:
    """Of all versions of a day, if every one is kept."""
    patches = 0.0 if whole_every == 1 else size.patch_bytes
    return DAY_S / step_s * (size.whole_bytes / whole_every + patches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Of a day, on average."""

    workers: float
    requests: float
    """That go on elsewhere."""
    sampled_again: float
    prefilled_again: float
    trainer: float


def failures_day(size: Size, run: ScaleRun) -> Failures:
    """What one lost worker cost in the modelled run, as often as the published rate says."""
    lost, losses = size.gpus * size.failures_gpu_day, run.losses
    each = lost / max(1, losses.workers)
    return Failures(
        workers=lost,
        requests=each * losses.requests,
        sampled_again=each * losses.sampled_again,
        prefilled_again=each * losses.prefilled_again,
        trainer=size.trainer_gpus * size.failures_gpu_day,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """Seconds until a role works again."""

    orchestrator_read_s: float
    orchestrator_fold_s: float
    trainer_read_s: float
    worker_s: float


def restarts_of(
    size: Size, rates: Rates, speeds: Speeds, snapshot: SnapshotFigure, hosting: Hosting
) -> Restarts:
    """The oldest snapshot is `SNAPSHOT_EVERY` rounds behind; a trainer reads weights and moments of
    its checkpoint, 2 + 10 bytes a parameter, over all of its machines' links."""
    behind_s = SNAPSHOT_EVERY / rates.decisions_s
    machines = max(1, size.trainer_gpus / size.gpus_per_worker)
    return Restarts(
        orchestrator_read_s=snapshot.read_s,
        orchestrator_fold_s=behind_s * rates.trajectories_s * speeds.fold_s,
        trainer_read_s=6 * size.whole_bytes / min(size.store_gb_s, machines * size.link_gb_s) / 1e9,
        worker_s=hosting.worker_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Something that has a bound."""

    what: str
    now: float
    bound: float
    fixed: float = 0.0
    """Of `now`, what more workers do not make larger."""
    power: float = 1.0
    """How the rest grows with the workers: 2 where all of them read what all cause."""
    unit: str = ""
    mend: str = ""

    @property
    def share(self) -> float:
        """1 is at its bound."""
        return self.now / self.bound

    def workers(self, now: int) -> float | None:
        """At which it is reached; None where workers have no part in it."""
        grows = self.now - self.fixed
        if grows <= 0 or self.fixed >= self.bound:
            return None
        return float(now * ((self.bound - self.fixed) / grows) ** (1 / self.power))


def limits(
    size: Size,
    sizes: Sizes,
    rates: Rates,
    run: ScaleRun,
    snapshot: SnapshotFigure,
    patched: Hosting,
) -> list[Limit]:
    """Nearest to its bound first. More workers have as many requests each, and larger batches."""
    found = [
        *_size_limits(size, sizes, rates, snapshot),
        *_speed_limits(size, sizes, rates, run),
        *_version_limits(rates.step_s, patched),
    ]
    return sorted(found, key=lambda one: -one.share)


def _size_limits(size: Size, sizes: Sizes, rates: Rates, snapshot: SnapshotFigure) -> list[Limit]:
    """Of what is written in one piece."""
    longest = (size.prompt_tokens + size.max_tokens) * LONGCAT.route_bytes
    return [
        Limit(
            what="a commit: its batch and the names of all tensors",
            now=rates.control_largest / 1e6,
            bound=RECORD_BYTES_MAX / 1e6,
            fixed=sizes.manifest / 1e6,
            unit="MB",
            mend="smaller batches",
        ),
        Limit(
            what="experts of the longest trajectory, with sampling.routes",
            now=longest / 1e6,
            bound=ROUTES_BYTES_MAX / 1e6,
            fixed=longest / 1e6,
            unit="MB",
            mend="shorter responses",
        ),
        Limit(
            what="a round that takes a batch",
            now=rates.decision_largest / 1e6,
            bound=RECORD_BYTES_MAX / 1e6,
            unit="MB",
            mend="smaller batches",
        ),
        Limit(
            what="a snapshot of its state",
            now=snapshot.bytes / 1e6,
            bound=BODY_BYTES_MAX / 1e6,
            unit="MB",
        ),
    ]


def _speed_limits(size: Size, sizes: Sizes, rates: Rates, run: ScaleRun) -> list[Limit]:
    """Of those of whom there is one."""
    seconds, control = run.seconds, run.folded.cpu_s
    decisions = rates.decisions_s * rates.decision_bytes
    read_s = rates.control_s + size.workers * sizes.statuses_s
    return [
        Limit(
            what="the orchestrator's thread: plan, seal, fold",
            now=(run.decide_s + run.seal_s + control) / seconds,
            bound=1.0,
            unit="cores",
        ),
        Limit(
            what="its longest turn, against a lease",
            now=max(run.rounds_ms) / 1e3,
            bound=LEASE_S,
            unit="s",
        ),
        Limit(
            what="records that it reads",
            now=read_s,
            bound=RECORDS_POLLED * ROUNDS_S,
            unit="/s",
        ),
        Limit(
            what="decisions, which every worker reads, from one broker",
            now=decisions * (size.workers + 1) / 1e6,
            bound=BROKER_BYTES_S / 1e6,
            power=2.0,
            unit="MB/s",
        ),
        Limit(
            what="the trainer's reader: decoding trajectories",
            now=rates.trajectories_s * sizes.decode_s,
            bound=1.0,
            unit="cores",
        ),
    ]


def _version_limits(step: float, patched: Hosting) -> list[Limit]:
    """Of what happens once a step."""
    return [
        Limit(
            what="publishing a version, against a step",
            now=patched.publish_s,
            bound=step,
            fixed=patched.publish_s,
            unit="s",
            mend="--threads",
        ),
        Limit(
            what="hosting a version, against a step",
            now=patched.worker_s,
            bound=step,
            fixed=patched.worker_s,
            unit="s",
            mend="--threads, faster disks",
        ),
    ]

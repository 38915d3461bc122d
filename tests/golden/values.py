"""Values of the golden files: every record kind, with every field set at least once."""

from __future__ import annotations

import msgspec

from dora_pipe.schemas import control, metrics, policy, rounds
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import Resume, TakenGroup, TakenTrajectory
from dora_pipe.schemas.rounds import GroupSpec

AT_NS = 1_790_000_000_123_456_789
DIGEST = "a1" * 32
OTHER_DIGEST = "b2" * 32
SHA256 = "c3" * 32
DATA_DIGEST = "d4" * 32
GROUP = "g0000000042"
SECOND = "g0000000043"

TENSORS = (
    policy.Tensor(name="embed.weight", dtype="float32", shape=(16, 4), sha256="e5" * 32),
    policy.Tensor(name="norm.weight", dtype="float32", shape=(4,), sha256="f6" * 32),
)
MANIFEST = policy.Manifest(digest=policy.weights_digest(TENSORS), bytes=272, tensors=TENSORS)

GROUPS = (
    TakenGroup(
        group=GROUP,
        version=3,
        deadline=5,
        trajectories=(
            TakenTrajectory(
                trajectory=f"{GROUP}-000",
                attempt=1,
                incarnation=7,
                partition=2,
                offset=90,
                sha256=SHA256,
            ),
            TakenTrajectory(
                trajectory=f"{GROUP}-001",
                attempt=2,
                incarnation=9,
                partition=2,
                offset=95,
                sha256=DIGEST,
            ),
        ),
    ),
    TakenGroup(
        group=SECOND,
        version=4,
        deadline=6,
        trajectories=(
            TakenTrajectory(
                trajectory=f"{SECOND}-000",
                attempt=1,
                incarnation=7,
                partition=3,
                offset=0,
                sha256=SHA256,
            ),
        ),
    ),
)

CONTROL: tuple[control.AnyControl, ...] = (
    control.RunStarted(
        at_ns=AT_NS,
        run="demo",
        schema_version=1,
        config={"run": {"name": "demo", "steps": 20}, "staleness": {"async_batches": None}},
        config_digest=DIGEST,
        dataset_digest=DATA_DIGEST,
        dataset_rows=1000,
        eval_digest=OTHER_DIGEST,
        eval_rows=64,
        seed=2**62 + 1,
        policy=MANIFEST,
        assets_digest=SHA256,
        planner="consolidate 1",
        package="0.1.0",
        lineage=control.Lineage(run="before", step=12, digest=OTHER_DIGEST),
    ),
    control.RoleStarted(
        at_ns=AT_NS,
        role="trainer",
        incarnation=2,
        instance="trainer-5f",
        host="machine-1",
        pid=4242,
        package="0.1.0",
    ),
    control.WorkerJoined(
        at_ns=AT_NS,
        worker="w0",
        instance="w0-7c",
        host="machine-2",
        pid=4243,
        slots=64,
        prefetch=16,
        kv_tokens=65536,
        engine="torch",
        engine_version="1",
        dtype="float32",
        device="cpu",
        declares=("batch_invariant", "counter_sampling"),
        assets_digest=SHA256,
        reward_digest=OTHER_DIGEST,
        package="0.1.0",
    ),
    control.WorkerReady(
        at_ns=AT_NS, worker="w0", incarnation=7, version=3, digest=DIGEST, load_ms=12.25
    ),
    control.WorkerLeft(
        at_ns=AT_NS,
        worker="w0",
        incarnation=7,
        reason="drained",
        progress={f"{GROUP}-002": Resume(tokens=128, partition=2, offset=17)},
    ),
    control.TrajectoriesLogged(
        at_ns=AT_NS,
        worker="w0",
        incarnation=7,
        version=3,
        digest=DIGEST,
        trajectories=(
            control.LoggedEntry(
                trajectory=f"{GROUP}-000",
                attempt=1,
                partition=2,
                offset=90,
                sha256=SHA256,
                bytes=1431,
                tokens=21,
                reward=0.75,
                finish="stop",
                tool_error="KeyError: tools.py:3: 'Oslo'",
            ),
            control.LoggedEntry(
                trajectory=f"{GROUP}-001",
                attempt=2,
                partition=2,
                offset=91,
                sha256=SHA256,
                bytes=1502,
                tokens=24,
                reward=None,
                finish="length",
            ),
        ),
    ),
    control.RequestReleased(
        at_ns=AT_NS,
        worker="w0",
        incarnation=7,
        trajectory=f"{GROUP}-002",
        attempt=1,
        resume=Resume(tokens=130, partition=2, offset=18),
        kv=policy.Blob(sha256=SHA256, bytes=65_536),
    ),
    control.RequestFailed(
        at_ns=AT_NS,
        worker="w0",
        incarnation=7,
        trajectory=f"{GROUP}-003",
        attempt=1,
        error="ResourceError",
        message="sequence is longer than a slot è 1025 > 1024",
        retryable=True,
    ),
    control.StepCommitted(
        at_ns=AT_NS,
        step=4,
        attempt=2,
        incarnation=2,
        groups=GROUPS,
        batch_digest=batch_digest(GROUPS),
        digest_before=DIGEST,
        digest_after=MANIFEST.digest,
        policy=MANIFEST,
        contributions=policy.Blob(sha256="17" * 32, bytes=4096),
        metrics={"loss": -0.0125, "grad_norm": 0.5, "tokens": 63.0},
        settings={
            "trainer.learning_rate": 3e-4,
            "run.steps": 20,
            "objective.loss": "token-mean",
            "objective.advantage_std": True,
        },
        numerics={"torch": "2.13.0", "threads": "1"},
        decisions_next=77,
        compute_s=1.5,
        checkpoint=policy.Blob(sha256="28" * 32, bytes=8192),
        adopted=True,
    ),
    control.BatchRefused(
        at_ns=AT_NS,
        step=4,
        attempt=1,
        incarnation=2,
        offenders=(
            control.Offender(group=GROUP, trajectory=f"{GROUP}-001", reason="sha256 differs"),
        ),
    ),
    control.Command(
        at_ns=AT_NS, user="ada", verb="set", args={"key": "trainer.learning_rate", "value": 1e-4}
    ),
    control.WeightsAdopted(
        at_ns=AT_NS,
        step=4,
        incarnation=3,
        digest_committed=DIGEST,
        digest_replayed=OTHER_DIGEST,
        reason="numerics differ: device",
    ),
    control.VersionsDropped(at_ns=AT_NS, user="ada", versions=(1, 2, 4)),
)

COST = metrics.Cost(total_s=10.5, bus_s=1.25, control_s=0.5, codec_s=0.75, rss_bytes=123_456_789)

WAIT = metrics.Wait(
    name="groups",
    description=f"groups {GROUP} (version 3, 1 of 8 open) and 1 more",
    since_ns=AT_NS - 31_000_000_000,
    limit_ms=30_000,
    overdue=True,
    blocking=True,
    blockers=(metrics.Blocker("group", GROUP),),
    more=1,
)

METRICS: tuple[metrics.AnyMetrics, ...] = (
    metrics.WorkerStatus(
        at_ns=AT_NS,
        waits=(WAIT,),
        cost=COST,
        worker="w0",
        incarnation=7,
        version=3,
        active=12,
        waiting=4,
        kv_used_tokens=2048,
        tokens_total=99_999,
        progress={f"{GROUP}-002": Resume(tokens=128, partition=2, offset=17)},
        weights_at="grpc://10.0.0.7:40123/weights/" + "b" * 64 + ".safetensors",
    ),
    metrics.TrainerStatus(
        at_ns=AT_NS,
        waits=(),
        cost=COST,
        incarnation=2,
        step=5,
        phase="idle",
        cached_records=31,
        cached_bytes=45_000,
        weights_at="grpc://10.0.0.8:40123/weights/" + "b" * 64 + ".safetensors",
    ),
    metrics.OrchestratorStatus(
        at_ns=AT_NS,
        waits=(WAIT,),
        cost=COST,
        incarnation=1,
        version=5,
        open_groups=8,
        queued_requests=3,
        closed_by="staleness.max_staleness = 1: 8 groups are due by step 6",
    ),
)

SPEC = GroupSpec(
    group=GROUP,
    ordinal=42,
    purpose="train",
    version=3,
    digest=DIGEST,
    deadline=5,
    partition=2,
    dataset_digest=DATA_DIGEST,
    index=17,
    data_epoch=1,
    seed=2**62 + 3,
    size=8,
)

OBSERVATIONS: tuple[rounds.AnyObservation, ...] = (
    rounds.LeaseExpired(worker="w1", incarnation=9),
    rounds.Progressed(trajectory=f"{GROUP}-002", resume=Resume(tokens=128, partition=2, offset=17)),
    rounds.KvPressure(worker="w0", incarnation=7, used_tokens=60_000),
    rounds.PlanPeriod(),
)

DECISIONS: tuple[rounds.AnyDecision, ...] = (
    rounds.Dispatch(reason="a slot is free", spec=SPEC),
    rounds.Schedule(
        reason="its worker was lost",
        spec=SPEC,
        worker="w0",
        incarnation=7,
        samples=(
            rounds.ScheduledSample(
                sample=2, attempt=2, resume=Resume(tokens=128, partition=2, offset=17)
            ),
            rounds.ScheduledSample(
                sample=3,
                attempt=3,
                resume=Resume(tokens=130, partition=2, offset=18),
                kv=policy.Blob(sha256=SHA256, bytes=65_536),
            ),
            rounds.ScheduledSample(sample=5, attempt=1),
        ),
    ),
    rounds.Migrate(
        reason="version 3 fits on w1",
        trajectory=f"{GROUP}-002",
        attempt=1,
        worker="w0",
        incarnation=7,
        to="w1",
        to_incarnation=9,
    ),
    rounds.Cancel(
        reason="its group failed", trajectory=f"{GROUP}-004", attempt=1, worker="w0", incarnation=7
    ),
    rounds.Assign(reason="freed", worker="w0", incarnation=7, version=4, digest=OTHER_DIGEST),
    rounds.Drain(reason="asked by ada", worker="w2", incarnation=11),
    rounds.Fence(reason="lease expired", worker="w1", incarnation=9),
    rounds.TakeBatch(
        reason="B finished",
        step=4,
        attempt=2,
        groups=GROUPS,
        settings={"trainer.learning_rate": 3e-4},
    ),
    rounds.End(reason="all rewards equal", group=SECOND, outcome="filtered"),
    rounds.StopRun(reason="20 steps are committed"),
)

FOLDED = rounds.fold_bytes(5, b'{"kind":"drain"}') + rounds.fold_bytes(7, b"{}")
"""Control bytes that the round below folds, as far as its chain is concerned."""

_BARE = rounds.Round(
    ordinal=64,
    incarnation=1,
    now_ns=5_000_000_000,
    control_next=8,
    observations=OBSERVATIONS,
    decisions=DECISIONS,
    planned=False,
    state_digest="39" * 32,
)
ROUND = msgspec.structs.replace(_BARE, chain=rounds.chain_of(rounds.GENESIS_CHAIN, FOLDED, _BARE))


# Fields that came later; the bytes above stay what they were released as.

COMMITTED_DROPPED = msgspec.structs.replace(
    next(one for one in CONTROL if isinstance(one, control.StepCommitted)), dropped=(1, 2)
)
RELEASED_PEER = control.RequestReleased(
    at_ns=AT_NS,
    worker="w0",
    incarnation=7,
    trajectory=f"{GROUP}-002",
    attempt=1,
    resume=Resume(tokens=130, partition=2, offset=18),
    kv=policy.Blob(sha256=SHA256, bytes=65_536, peer="grpc://10.0.0.7:40123"),
    left_ns=AT_NS - 40_000_000,
)
"""Between machines a KV cache is fetched from the peer that offers it."""

ROUND_PINS = rounds.Round(
    ordinal=1,
    incarnation=0,
    now_ns=1,
    control_next=1,
    decisions=(
        rounds.TakeBatch(
            reason="B finished",
            step=4,
            attempt=1,
            groups=GROUPS,
            settings={"trainer.learning_rate": 3e-4},
            pins=(3, 4),
        ),
    ),
)

JOINED_SEVERAL = msgspec.structs.replace(
    next(one for one in CONTROL if isinstance(one, control.WorkerJoined)), max_resident_versions=4
)
"""A worker that hosts several versions at once."""

ROUND_DROPS = rounds.Round(
    ordinal=2,
    incarnation=0,
    now_ns=2,
    control_next=2,
    decisions=(
        rounds.Assign(
            reason="version 5 is there",
            worker="w1",
            incarnation=9,
            version=5,
            digest=DIGEST,
            drop=(2, 3),
        ),
    ),
)
"""It takes one more version, and lets go of two."""

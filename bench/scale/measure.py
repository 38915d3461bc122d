"""Measures what `dora-pipe sim scale` multiplies: records of every kind, encoded by the real codec
with names and numbers of a long run; how fast one thread hashes, compares and applies; a restart.

Times are CPU time of one thread, but for the restart of an orchestrator, which is on the clock.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from dora_pipe.bench.codec import in_arrays, sample_trajectory
from dora_pipe.bench.restart import bench_restart
from dora_pipe.bench.scale.size import LONGCAT, NOW_NS, MixtureShape, Size, manifest_tensors
from dora_pipe.bench.status import bench_status
from dora_pipe.orchestrator.snapshots import body_of, state_of
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.fast_encode import write_trajectory
from dora_pipe.schemas.fast_validate import FastValidator
from dora_pipe.schemas.policy import Manifest, weights_digest
from dora_pipe.schemas.rounds import Round, seal
from dora_pipe.schemas.routes import Routes
from dora_pipe.schemas.trajectory import Progress
from dora_pipe.schemas.trajectory_codec import encode_progress
from dora_pipe.schemas.wire import encode
from dora_pipe.store.patch import opened_patch, write_patch
from dora_pipe.store.safetensors_file import TensorSource, mapped, read_entries, write_tensors

HASHED_BYTES: Final = 64 << 20
PATCHED_ELEMENTS: Final = 12 << 20
"""Of two versions that are compared: below what is shared out over threads."""
ROUTED_TOKENS: Final = 256
RESTARTED: Final = 2_000
"""Trajectories of the log whose end an orchestrator starts at."""
REPEATS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of records, and what a trajectory's cost a reader."""

    trajectory: int
    """Of a mean response with its prompt: ids, log-probs, mask."""
    routes: float
    """Of a token's experts, in a record."""
    progress: int
    statuses_s: float
    """Of one full worker."""
    status: float
    manifest: int
    """In JSON, as a commit has it."""
    empty_round: int
    """Of a round that decides nothing."""
    encode_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Bytes of a version per second and thread; seconds of a restart."""

    hash_bytes_s: float
    compare_bytes_s: float
    """Comparing two versions and compressing what differs."""
    apply_bytes_s: float
    """Copying a version and overwriting what a patch has."""
    fold_s: float
    """An orchestrator's restart, per trajectory that is folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFigure:
    """A state as the orchestrator keeps it."""

    bytes: int
    read_s: float


def measure_sizes(size: Size, tokens: int) -> Sizes:
    """For responses of so many sampled tokens, on average."""
    trajectory = in_arrays(sample_trajectory(size.prompt_tokens + tokens))
    value, _ = write_trajectory(trajectory)
    view = FastValidator().view
    status = bench_status([size.slots])[0]
    return Sizes(
        trajectory=len(value),
        routes=route_bytes(LONGCAT),
        progress=progress_bytes(size.checkpoint_tokens),
        statuses_s=status.statuses_per_s,
        status=status.bytes_per_s / status.statuses_per_s,
        manifest=manifest_bytes(),
        empty_round=len(
            seal(
                "00" * 32,
                b"",
                Round(ordinal=10**6, role_epoch=1, now_ns=NOW_NS, control_next=10**9),
            )[1]
        ),
        encode_s=_cpu_s(lambda: write_trajectory(trajectory)),
        decode_s=_cpu_s(lambda: view(value)),
    )


def progress_bytes(tokens: int) -> int:
    """Of a progress record of so many tokens."""
    sample = in_arrays(sample_trajectory(4 * tokens))
    logprobs = sample.logprobs[tokens : 2 * tokens]
    record = Progress(
        trajectory=sample.trajectory,
        attempt=1,
        version=sample.version,
        digest=sample.digest,
        worker="w00000",
        epoch=10**9,
        start=tokens,
        token_ids=sample.token_ids[tokens : 2 * tokens],
        logprobs=[one or 0.0 for one in logprobs],
        sampler_logprobs=[one or 0.0 for one in logprobs],
        prefills=(tokens,),
        previous=10**9,
        started_ns=NOW_NS,
    )
    return len(encode_progress(record))


def route_bytes(shape: MixtureShape) -> float:
    """What one token's experts add to a trajectory's record.

    Experts are drawn with equal chances, which is what a router is balanced to: the worst case.
    """
    chance, experts = np.random.default_rng(1), shape.experts + shape.idle_experts
    every = chance.random((ROUTED_TOKENS, shape.layers, experts), np.float32)
    choices = np.argpartition(every, shape.per_token)[..., : shape.per_token].astype("<u2")
    plain = in_arrays(sample_trajectory(ROUTED_TOKENS))
    routed = replace(plain, routed_experts=Routes.of(choices, experts))
    return (len(write_trajectory(routed)[0]) - len(write_trajectory(plain)[0])) / ROUTED_TOKENS


def manifest_bytes() -> int:
    """Of a version of the mixture, as JSON."""
    tensors = manifest_tensors()
    digest = weights_digest(tensors)
    return len(encode(Manifest(digest=digest, bytes=2 * LONGCAT.parameters, tensors=tensors)))


def measure_speeds(size: Size) -> Speeds:
    """On this machine, now."""
    data = np.random.default_rng(1).bytes(HASHED_BYTES)
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as name:
        folder = Path(name)
        compare_s, apply_s = _patch_seconds(folder, size.changed_share)
        restart = next(bench_restart(folder, [RESTARTED]))
    whole = 2 * PATCHED_ELEMENTS
    return Speeds(
        hash_bytes_s=HASHED_BYTES / _cpu_s(lambda: hashlib.sha256(data).digest()),
        compare_bytes_s=whole / compare_s,
        apply_bytes_s=whole / apply_s,
        fold_s=restart.folded_s / RESTARTED,
    )


def _patch_seconds(folder: Path, share: float) -> tuple[float, float]:
    """Of writing a patch of a share of the weights, and of applying it to a copy."""
    chance = np.random.default_rng(2)
    before = chance.integers(0, 0x7E00, PATCHED_ELEMENTS, np.uint16)
    differs = chance.random(PATCHED_ELEMENTS, np.float32) < share
    paths = [folder / "before", folder / "after"]
    for path, bits in zip(paths, (before, before + differs), strict=True):
        bits = bits.astype("<u2")
        shape = (PATCHED_ELEMENTS,)
        write_tensors(path, [TensorSource(name="w", dtype="BF16", shape=shape, data=bits.tobytes)])
    patch = folder / "patch"

    def compare() -> Any:
        write_patch(patch, *paths, digest_before="00" * 32, digest_after="01" * 32)

    def make() -> Any:
        with opened_patch(patch) as opened, mapped(paths[0]) as data:
            (entry,) = read_entries(paths[0])
            bits = np.frombuffer(data[entry.start : entry.end], "<u2").copy()
            opened.apply("w", bits)

    return _cpu_s(compare), _cpu_s(make)


def measure_snapshot(state: State) -> SnapshotFigure:
    """Of a state, and reading it again."""
    body = body_of(state).joined()
    return SnapshotFigure(bytes=len(body), read_s=_cpu_s(lambda: state_of(body), repeats=1))


def with_routes(sizes: Sizes, tokens: int) -> Sizes:
    """The same with a column of experts in every trajectory of so many tokens."""
    return replace(sizes, trajectory=sizes.trajectory + round(sizes.routes * tokens))


def _cpu_s(work: Callable[[], Any], *, repeats: int = REPEATS) -> float:
    """The least of some."""
    found = []
    for _ in range(repeats):
        began_s = time.process_time()
        work()
        found.append(time.process_time() - began_s)
    return max(1e-9, min(found))

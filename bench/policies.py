"""What versions cost as patches: a policy of 25 million weights is trained on the built-in task,
by learner and engine of a run, on policy, and every version is published in bfloat16, whole and as
a patch of the one before it. It decides nothing.

What is published is rounded from the learner's float32 weights, which go on: the masters of a run
whose policies are bfloat16. Afterwards every version is made of what lies in the store alone, one
patch has one byte damaged, and workers, each a process with a cache of its own, get the last
version from a store of a given speed that they share, or from a peer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from dora_pipe.bench.moves_weights import RUN, Task, run_all, serve
from dora_pipe.bench.offpolicy import BASE
from dora_pipe.bench.offpolicy_cell import Bench
from dora_pipe.config.load import load_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import PolicyError
from dora_pipe.launch.examples import Shape, example_file, write_word_model
from dora_pipe.launch.warm_start import demonstrations, sft_options, warm_up
from dora_pipe.producers.tasks import arithmetic
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.arrow_files import open_files
from dora_pipe.store.names import patch_name
from dora_pipe.store.patch import opened_patch
from dora_pipe.store.safetensors_file import TensorSource, mapped, read_entries, write_tensors
from dora_pipe.store.store import PolicyStore, PublishedVersion

SHAPE: Final = Shape(hidden=896, heads=28, context_tokens=256)
"""Two layers: 25.8 million weights."""

OVERRIDES: Final = (
    "groups.per_step=4",
    "groups.size=4",
    "groups.filter_zero_advantage=false",
    "task.options={mu=1.0, sigma=1.0, n_max=6}",
    "trainer.minibatches=1",
)
WARM_STEPS: Final = 60
WARM_BATCH: Final = 16
WARM_LEARNING_RATE: Final = 3e-4
BEHIND: Final = 3
"""Versions that a worker lacks which is some behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsFigure:
    """What the steps of a run cost, at a learning rate.

    Shares are of the weights that changed, and of the bytes that a patch has of the whole file:
    the mean and the largest. `write_s` is until a patch is compared, written and durable, beside
    `whole_s` for the whole file; `make_s` until a version is made of the one before it and a patch,
    hashed and durable. `equal` of `versions`, those that differ, were made of the store alone with
    the digest that they have; `refused` says that a patch with one byte damaged was.
    """

    learning_rate: float
    steps: int
    weights: int
    whole_mb: float
    changed_mean: float
    changed_max: float
    patch_mb: float
    share_mean: float
    share_max: float
    write_s: float
    whole_s: float
    make_s: float
    equal: int
    versions: int
    refused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigure:
    """One way to bring the last version to so many workers at once.

    `behind` is how many versions the workers lack; `last_s` until all have the file, `store_mb`
    what the store gave.
    """

    way: str
    source: str
    workers: int
    store_mb_s: int
    behind: int
    last_s: float
    store_mb: float


@dataclass(slots=True)
class _Published:
    """A version, and how long its files took."""

    version: PublishedVersion
    patch_s: float = 0.0


def bench_steps(
    folder: Path, *, steps: int, learning_rate: float, whole_every: int, warm_steps: int
) -> tuple[StepsFigure, list[str]]:
    """Train and publish in `folder`; what that cost, and the digests of the versions.

    Raises PolicyError, ConfigError.
    """
    trainer = _trainer(folder)
    config = _config(folder, steps, learning_rate)
    _write_start(config, folder, warm_steps)
    found: list[_Published] = []
    (folder / "scratch").mkdir()
    bench = Bench(config, Path(config.model.path), folder / "scratch")
    for path in bench.policies(BASE):
        found.append(_publish(trainer, path, found, whole_every))
    digests = list(dict.fromkeys(one.version.manifest.digest for one in found))
    if len(digests) == 1:
        raise PolicyError("no step has changed a weight", hint="--warm-steps 60, or more --steps")
    whole_s = _whole_seconds(folder, trainer, digests[-1])
    make_s = _make_seconds(folder, digests)
    equal = sum(_is_made(_alone(folder), digest) for digest in digests)
    return (
        _steps_figure(learning_rate, found, whole_s, make_s, equal, _refuses(folder, digests)),
        digests,
    )


def bench_hosts(
    folder: Path, digests: Sequence[str], workers: Sequence[int], *, store_mb_s: int
) -> Iterator[HostFigure]:
    """Bring the last version of `bench_steps` to workers: whole, by a patch, and by several."""
    with ExitStack() as stack:
        served = serve(folder / "trainer", stack)
        _trainer(folder).weights(digests[-1])
        ways = [("whole", 0), ("patch", 1)]
        ways += [("patches", BEHIND)] if len(digests) > BEHIND else []
        for number in workers:
            for (way, behind), peers in (
                (way, peers) for way in ways for peers in ((), (served.address,))
            ):
                tasks = [
                    Task(
                        root=str(folder / f"{way}-{number}-{len(peers)}-{one}"),
                        store=str(folder / "whole" if way == "whole" else folder / "store"),
                        digest=digests[-1],
                        peers=peers,
                        store_mb_s=store_mb_s / number,
                        hashers=2,
                        has=digests[-1 - behind] if behind else "",
                    )
                    for one in range(number)
                ]
                took = run_all(tasks)
                yield HostFigure(
                    way=way,
                    source="peer" if peers else "store",
                    workers=number,
                    store_mb_s=store_mb_s,
                    behind=behind,
                    last_s=round(max(one.seconds for one in took), 3),
                    store_mb=round(sum(one.store_bytes for one in took) / 1e6, 2),
                )


def _trainer(folder: Path) -> PolicyStore:
    return PolicyStore(folder / "trainer", open_files((folder / "store").as_uri(), folder=RUN))


def _alone(folder: Path) -> PolicyStore:
    """The store as it lies there, without what the trainer has."""
    return PolicyStore(folder / "store" / RUN)


def _config(folder: Path, steps: int, learning_rate: float) -> Config:
    given = (
        *OVERRIDES,
        f"run.steps={steps}",
        f"trainer.learning_rate={learning_rate!r}",
        f'model.path="{folder / "warm"}"',
    )
    return load_config(example_file("arithmetic"), given)


def _write_start(config: Config, folder: Path, steps: int) -> None:
    """A model that has seen demonstrations: weights that were trained, and rewards that differ."""
    write_word_model(folder / "random", arithmetic.WORDS, shape=SHAPE)
    model = msgspec.structs.replace(config.model, path=str(folder / "random"))
    options = sft_options(
        config, steps=steps, batch=WARM_BATCH, learning_rate=WARM_LEARNING_RATE, seed=1
    )
    rows = demonstrations(config, seed=1, count=steps * WARM_BATCH)
    warm_up(msgspec.structs.replace(config, model=model), rows, folder / "warm", options)


def _publish(
    trainer: PolicyStore, path: Path, before: Sequence[_Published], whole_every: int
) -> _Published:
    """A version in bfloat16, timed from when its own file is written."""
    written_s = 0.0

    def write(target: Path) -> Manifest:
        nonlocal written_s
        manifest = write_rounded(path, target)
        written_s = time.perf_counter()
        return manifest

    version = trainer.publish_version(
        write,
        before=before[-1].version.manifest.digest if before else "",
        whole=len(before) % whole_every == 0,
    )
    return _Published(version, time.perf_counter() - written_s)


def write_rounded(source: Path, target: Path) -> Manifest:
    """Write float32 weights as bfloat16, each rounded to the nearest, ties to even."""
    with mapped(source) as data:
        sources = []
        for entry in read_entries(source):
            assert entry.dtype == "F32", entry.name
            bits = np.frombuffer(data[entry.start : entry.end], "<u4").astype(np.uint64)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
            sources.append(
                TensorSource(name=entry.name, dtype="BF16", shape=entry.shape, data=rounded.tobytes)
            )
            del bits
        return write_tensors(target, sources)


def _whole_seconds(folder: Path, trainer: PolicyStore, digest: str) -> float:
    """Until a whole file is durable in a store elsewhere; it lies in `whole` from then on."""
    files = open_files((folder / "whole").as_uri(), folder=RUN)
    began_s = time.perf_counter()
    files.put(trainer.weights(digest), f"weights/{digest}.safetensors")
    return time.perf_counter() - began_s


def _make_seconds(folder: Path, digests: Sequence[str]) -> float:
    """Until the last version that is not whole is made of the one before it, which is there; 0
    where all are whole."""
    store = _alone(folder)
    digest = next((one for one in reversed(digests) if not store.has_whole(one)), None)
    if digest is None:
        return 0.0
    with opened_patch(store.patch(digest)) as patch:
        store.weights(patch.before)
    took = []
    for _ in range(3):
        store.drop_copy(digest)
        began_s = time.perf_counter()
        store.weights(digest)
        took.append(time.perf_counter() - began_s)
    return statistics.median(took)


def _is_made(store: PolicyStore, digest: str) -> bool:
    return store.verify(digest).digest == digest


def _refuses(folder: Path, digests: Sequence[str]) -> bool:
    """Whether the last patch is refused with one byte of it damaged; it is mended afterwards."""
    store = _alone(folder)
    path = store.root / patch_name(digests[-1])
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[len(sound) // 2] ^= 1
    path.write_bytes(damaged)
    try:
        store.make(digests[-1], folder / "refused", lambda digest: None)
    except PolicyError:
        return True
    finally:
        path.write_bytes(sound)
    return False


def _steps_figure(
    learning_rate: float,
    found: Sequence[_Published],
    whole_s: float,
    make_s: float,
    equal: int,
    refused: bool,
) -> StepsFigure:
    patched = [one for one in found if one.version.patch and one.version.change]
    shares = [one.version.change.share for one in patched if one.version.change]
    sizes = [one.version.patch.bytes for one in patched if one.version.patch]
    whole = found[-1].version.manifest.bytes
    return StepsFigure(
        learning_rate=learning_rate,
        steps=len(found) - 1,
        weights=whole // 2,
        whole_mb=round(whole / 1e6, 2),
        changed_mean=round(statistics.mean(shares), 5),
        changed_max=round(max(shares), 5),
        patch_mb=round(statistics.mean(sizes) / 1e6, 3),
        share_mean=round(statistics.mean(sizes) / whole, 5),
        share_max=round(max(sizes) / whole, 5),
        write_s=round(statistics.median(one.patch_s for one in patched), 3),
        whole_s=round(whole_s, 3),
        make_s=round(make_s, 3),
        equal=equal,
        versions=len({one.version.manifest.digest for one in found}),
        refused=refused,
    )

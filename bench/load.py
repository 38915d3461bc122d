"""Measures what a worker's memory grows by while its engine takes a version: it decides nothing.

The engine is production's, in a process of its own, which has weights already. What counts is all
that the kernel counts as the process's own memory at its peak (VmHWM, set back before): what it
allocated, and pages of mapped files that are in memory at the time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from dora_pipe.bench.moves_engine import write_config
from dora_pipe.bench.peak import fresh_peak, peak_bytes
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.producers.engines.torch.causal_lm import CausalLM
from dora_pipe.producers.engines.torch.rope import Rope
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.safetensors_file import DTYPE_BYTES, TensorSource, write_tensors
from dora_pipe.store.verified import note_path

DTYPES: Final = ("float32", "bfloat16")
_STORED: Final = {"float32": "F32", "bfloat16": "BF16"}
_MODULE: Final = "dora_pipe.bench.load"
_HIDDEN: Final = 1024
_SLOTS: Final = 2
_CONTEXT_TOKENS: Final = 64
_SETTLED_S: Final = 0.2
"""A note of a file is believed when it is so much younger."""

Way = Literal["read", "noted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigure:
    """One load. `way`: the file is read and hashed, or known by the note of who did.

    Example: ``LoadFigure(dtype="bfloat16", way="noted", file_mb=250.0, largest_mb=65.5,
    own_mb=900.0, above_mb=66.0, share=1.01, seconds=0.2)``: `above_mb` over `own_mb` at the peak,
    which is `share` times the largest tensor of the file.
    """

    dtype: str
    way: str
    file_mb: float
    largest_mb: float
    own_mb: float
    above_mb: float
    share: float
    seconds: float


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says of a load."""

    way: Way
    own_bytes: int
    peak_bytes: int
    seconds: float


def bench_load(folder: Path, dtypes: Sequence[str], gigabytes: float) -> Iterator[LoadFigure]:
    """Two figures for each type of numbers. Raises UsageError, ResourceError."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"there is no type {dtype!r}", hint=f"there are: {', '.join(DTYPES)}")
        size = DTYPE_BYTES[_STORED[dtype]]
        model = _model(int(gigabytes * 1e9) // size)
        place = folder / dtype
        write_config(place / "model", model)
        weights = place / "weights.safetensors"
        manifest = _write_weights(weights, model, _STORED[dtype])
        largest = size * max(int(np.prod(shape)) for shape in model.tensors().values())
        for one in _measured(place / "model", weights, manifest.digest):
            above = one.peak_bytes - one.own_bytes
            yield LoadFigure(
                dtype=dtype,
                way=one.way,
                file_mb=round(manifest.bytes / 1e6, 1),
                largest_mb=round(largest / 1e6, 1),
                own_mb=round(one.own_bytes / 1e6, 1),
                above_mb=round(above / 1e6, 1),
                share=round(above / largest, 3),
                seconds=round(one.seconds, 3),
            )
        weights.unlink()


def _model(numbers: int) -> CausalLM:
    """A llama of about so many numbers, an eighth of them in the embedding at first."""
    shape: dict[str, Any] = dict(
        family="llama",
        hidden=_HIDDEN,
        intermediate=4 * _HIDDEN,
        heads=16,
        kv_heads=4,
        head_dim=64,
        norm_eps=1e-6,
        rope=Rope(kind="default", theta=10_000.0),
        tied=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )
    vocabulary = max(256, numbers // 8 // _HIDDEN)
    found = CausalLM(layers=1, vocabulary=vocabulary, **shape)
    one, two = _numbers(found), _numbers(replace(found, layers=2))
    return replace(found, layers=max(1, 1 + (numbers - one) // (two - one)))


def _numbers(model: CausalLM) -> int:
    return sum(int(np.prod(size)) for size in model.tensors().values())


def _write_weights(path: Path, model: CausalLM, dtype: str) -> Manifest:
    """Random numbers between 1 and 2, whatever their type, one tensor at a time."""
    chance = np.random.default_rng(1)
    unit = DTYPE_BYTES[dtype]

    def data(elements: int) -> bytes:
        if unit == 2:
            return (chance.integers(0x3F80, 0x4000, elements, np.uint16)).tobytes()
        return (chance.random(elements, np.float32) + 1).tobytes()

    return write_tensors(
        path,
        [
            TensorSource(
                name=name,
                dtype=dtype,
                shape=shape,
                data=lambda shape=shape: data(int(np.prod(shape))),  # type: ignore[misc]
            )
            for name, shape in model.tensors().items()
        ],
    )


def _measured(model_dir: Path, weights: Path, digest: str) -> list[Loaded]:
    words = [sys.executable, "-m", _MODULE, str(model_dir), str(weights), digest]
    ended = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        raise ResourceError("a process of the bench has ended", hint="it said why above")
    return msgspec.json.decode(ended.stdout, type=list[Loaded])


def load_again(model_dir: Path, weights: Path, digest: str) -> list[Loaded]:
    """Take the same weights three times: the first makes the engine what it is."""
    from dora_pipe.producers.engines.torch.engine import TorchEngine

    engine = TorchEngine.open(model_dir, slots=_SLOTS, context_tokens=_CONTEXT_TOKENS, threads=1)
    time.sleep(_SETTLED_S)
    engine.load(weights, version=0, digest=digest)
    found = []
    ways: tuple[Way, Way] = ("read", "noted")
    for version, way in enumerate(ways, start=1):
        if way == "read":
            note_path(weights).unlink()
        own_bytes = fresh_peak("cpu")
        began_s = time.perf_counter()
        engine.load(weights, version=version, digest=digest)
        seconds = time.perf_counter() - began_s
        found.append(
            Loaded(way=way, own_bytes=own_bytes, peak_bytes=peak_bytes("cpu"), seconds=seconds)
        )
    return found


def main() -> None:
    """One process of it."""
    model_dir, weights, digest = sys.argv[1:]
    found = load_again(Path(model_dir), Path(weights), digest)
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()

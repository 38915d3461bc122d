"""LoRA policies as files (Hu et al. 2021, arXiv 2106.09685).

A version is a base and an adapter: A [rank, in] and B [out, rank] per layer, which computes x W^T +
scale (x A^T) B^T. Its safetensors file has peft's tensor names in the base's dtype, and two tensors
for the base's digest and the scale. The file's digest, which is the policy's, covers all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import Manifest, PolicyDtype
from dora_pipe.store.safetensors_file import (
    Entry,
    TensorSource,
    content_of,
    mapped,
    narrowed,
    read_entries,
    read_manifest,
    widened,
    write_tensors,
)

BASE: Final = "dora_pipe.base"
"""Tensor: digest of the base, 32 bytes."""
SCALE: Final = "dora_pipe.scale"
"""Tensor: alpha / rank, one float32."""

PREFIX: Final = "base_model.model."
"""Peft's prefix of layer names."""
A, B = ".lora_A.weight", ".lora_B.weight"

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
FOLDER: Final = "adapter"
"""Subdirectory of an export: `from_pretrained` would load an adapter next to merged weights."""

_BASE_BYTES: Final = 32
_ALPHA_DIGITS: Final = 9
"""Maximum decimals; float32 has no more."""

_FLOATS: Final = {"F32": "<f4", "BF16": "<u2"}
_EITHER: Final = "float32 or bfloat16"

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Adapter in memory. `pairs` maps a layer, ``model.layers.0.self_attn.q_proj``, to (A, B),
    float32 [rank, in] and [out, rank]."""

    base: str
    """Weights digest (hex) of the base."""
    scale: float
    pairs: Mapping[str, tuple[Array, Array]]
    dtype: PolicyDtype = "float32"
    """Dtype in a file; bfloat16 numbers are exact in float32."""

    @property
    def rank(self) -> int:
        return next((len(a) for a, _ in self.pairs.values()), 0)

    @property
    def alpha(self) -> float:
        """Return the shortest decimal that divided by the rank is the scale: 16, not 16.0000005."""
        alpha = self.scale * self.rank
        rounded = (round(alpha, digits) for digits in range(_ALPHA_DIGITS))
        return next((a for a in rounded if np.float32(a / self.rank) == self.scale), alpha)


def a_name(layer: str) -> str:
    return f"{PREFIX}{layer}{A}"


def b_name(layer: str) -> str:
    return f"{PREFIX}{layer}{B}"


def base_tensors(base: str, scale: float) -> list[TensorSource]:
    """Return the tensors of base digest and scale."""
    digest, factor = bytes.fromhex(base), np.array([scale], "<f4").tobytes()
    return [
        TensorSource(name=BASE, dtype="U8", shape=(_BASE_BYTES,), data=lambda: digest),
        TensorSource(name=SCALE, dtype="F32", shape=(1,), data=lambda: factor),
    ]


def base_of(path: Path) -> str | None:
    """Return an adapter's base digest, None for full weights.

    Raises PolicyError if it is not a safetensors file.
    """
    entry = next((entry for entry in read_entries(path) if entry.name == BASE), None)
    if entry is None:
        return None
    with mapped(path) as data:
        return _base(path, entry, data)


def stands_on(manifest: Manifest, base: str) -> bool:
    """Return whether the adapter's base has this digest."""
    expected = hashlib.sha256(bytes.fromhex(base)).hexdigest()
    return any(tensor.name == BASE and tensor.sha256 == expected for tensor in manifest.tensors)


def read_adapter(path: Path, *, digest: str) -> Adapter:
    """Read and verify an adapter. Raises PolicyError."""
    digest_read = read_manifest(path).digest
    if digest_read != digest:
        raise PolicyError(f"{path} has the weights digest {digest_read[:16]}, not {digest[:16]}")
    entries = {entry.name: entry for entry in read_entries(path)}
    with mapped(path) as data:
        base, scale = _marked(path, entries, data)
        layers = sorted(
            name[len(PREFIX) : -len(A)]
            for name in entries
            if name.startswith(PREFIX) and name.endswith(A)
        )
        expected = {BASE, SCALE, *map(a_name, layers), *map(b_name, layers)}
        if odd := sorted(expected ^ entries.keys()):
            raise PolicyError(f"{path} is not an adapter: unexpected tensor {odd[0]!r}")
        pairs = {
            layer: (
                _matrix(path, entries[a_name(layer)], data),
                _matrix(path, entries[b_name(layer)], data),
            )
            for layer in layers
        }
    ranks = {size for a, b in pairs.values() for size in (a.shape[0], b.shape[1])}
    if len(ranks) != 1:
        raise PolicyError(f"{path} is not an adapter: its ranks are {sorted(ranks)}")
    kinds = {entry.dtype for name, entry in entries.items() if name not in (BASE, SCALE)}
    if len(kinds) != 1:
        raise PolicyError(f"{path} is not an adapter: it has types {' and '.join(sorted(kinds))}")
    dtype: PolicyDtype = "bfloat16" if kinds == {"BF16"} else "float32"
    return Adapter(base=base, scale=scale, pairs=pairs, dtype=dtype)


def read_adapter_on(path: Path, *, digest: str, base: str, rank: int) -> Adapter:
    """Read an adapter, also checking base and rank. Raises PolicyError."""
    adapter = read_adapter(path, digest=digest)
    if adapter.base != base:
        prefix = base[:16] or "any"
        raise PolicyError(f"{path} has the base weights {adapter.base[:16]}, expected {prefix}")
    if adapter.rank != rank:
        raise PolicyError(f"{path} has rank {adapter.rank}, not {rank}")
    return adapter


def write_merged(base: Path, adapter: Adapter, path: Path) -> Manifest:
    """Write the base with the adapter merged, in the base's dtype. Raises PolicyError, OSError.

    Computed in float64 and rounded once; log-probs change by about 1e-6 (float32) or a few 0.01
    (bfloat16).
    """
    with ExitStack() as stack:
        data = stack.enter_context(mapped(base))
        entries = read_entries(base)
        scale = adapter.scale
        layers = {f"{layer}.weight": pair for layer, pair in adapter.pairs.items()}
        if odd := sorted(layers.keys() - {entry.name for entry in entries}):
            raise PolicyError(f"the adapter does not fit {base}: it has no tensor {odd[0]!r}")
        sources = [
            TensorSource.of(entry, _merged(base, entry, data, layers.get(entry.name), scale))
            for entry in entries
        ]
        return write_tensors(path, sources)


def write_peft(directory: Path, adapter: Adapter) -> None:
    """Write peft's format without a base model path. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / WEIGHTS, peft_sources(adapter))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in adapter.pairs}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def peft_sources(adapter: Adapter) -> Iterator[TensorSource]:
    kind = "BF16" if adapter.dtype == "bfloat16" else "F32"
    for layer, pair in adapter.pairs.items():
        for name, matrix in zip((a_name(layer), b_name(layer)), pair, strict=True):
            data = partial(_bytes_of, kind, matrix)
            yield TensorSource(name=name, dtype=kind, shape=matrix.shape, data=data)


def _base(path: Path, entry: Entry, data: memoryview) -> str:
    if entry.dtype != "U8" or entry.shape != (_BASE_BYTES,):
        raise PolicyError(f"{path} is not an adapter: {BASE} is not a digest")
    return bytes(data[entry.start : entry.end]).hex()


def _marked(path: Path, entries: Mapping[str, Entry], data: memoryview) -> tuple[str, float]:
    if BASE not in entries or SCALE not in entries:
        raise PolicyError(f"{path} is not an adapter: its base is missing")
    scale = entries[SCALE]
    if scale.dtype != "F32" or scale.shape != (1,):
        raise PolicyError(f"{path} is not an adapter: {SCALE} is not a number")
    factor = np.frombuffer(bytes(data[scale.start : scale.end]), "<f4")[0]
    return _base(path, entries[BASE], data), float(factor)


def _matrix(path: Path, entry: Entry, data: memoryview) -> Array:
    if entry.dtype not in _FLOATS or len(entry.shape) != 2:
        raise PolicyError(f"{path} is no adapter: {entry.name!r} is no matrix of {_EITHER}")
    return _numbers(entry, bytes(data[entry.start : entry.end]))


def _numbers(entry: Entry, data: bytes) -> Array:
    plain = np.frombuffer(data, _FLOATS[entry.dtype]).reshape(entry.shape)
    return widened(plain) if entry.dtype == "BF16" else plain.astype(np.float32)


def _bytes_of(kind: str, numbers: np.ndarray[Any, np.dtype[np.floating[Any]]]) -> bytes:
    return (narrowed(numbers) if kind == "BF16" else numbers.astype("<f4")).tobytes()


def _merged(
    path: Path, entry: Entry, data: memoryview, pair: tuple[Array, Array] | None, scale: float
) -> Callable[[], bytes]:
    plain = partial(content_of, entry, data)
    if pair is None:
        return plain
    a, b = pair
    if entry.dtype not in _FLOATS or entry.shape != (b.shape[0], a.shape[1]):
        raise PolicyError(f"the adapter does not fit {path}: {entry.name!r} is {entry.shape}")

    def added() -> bytes:
        merged = _numbers(entry, plain()).astype(np.float64)
        merged += scale * (b.astype(np.float64) @ a.astype(np.float64))
        return _bytes_of(entry.dtype, merged)

    return added

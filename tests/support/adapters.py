"""Random adapters for tests, and policies built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dora_pipe.schemas.policy import Manifest, PolicyDtype
from dora_pipe.store.adapters import Adapter, base_tensors, peft_sources
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.safetensors_file import (
    TensorSource,
    narrowed,
    read_entries,
    widened,
    write_tensors,
)
from dora_pipe.store.store import PolicyStore

RANK = 4
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Model directory with adapters; `policies` are (file, digest), the base first."""

    store: PolicyStore
    assets: str
    policies: Sequence[tuple[Path, str]]


def random_adapter(
    base: Path,
    digest: str,
    *,
    seed: int,
    rank: int = RANK,
    layers: Sequence[str] = LAYERS,
    size: float = 0.2,
    dtype: PolicyDtype = "float32",
) -> Adapter:
    chance = np.random.default_rng(seed)

    def drawn(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        array = (chance.standard_normal(shape) * size).astype(np.float32)
        return widened(narrowed(array)) if dtype == "bfloat16" else array

    pairs = {}
    for entry in read_entries(base):
        layer = entry.name.removesuffix(".weight")
        if layer.rpartition(".")[2] in layers and len(entry.shape) == 2:
            out, in_ = entry.shape
            pairs[layer] = (drawn(rank, in_), drawn(out, rank))
    return Adapter(base=digest, scale=2.0, pairs=pairs, dtype=dtype)


def adapter_sources(adapter: Adapter) -> list[TensorSource]:
    return [*peft_sources(adapter), *base_tensors(adapter.base, adapter.scale)]


def publish(store: PolicyStore, adapter: Adapter) -> Manifest:
    return store.publish_weights(lambda path: write_tensors(path, adapter_sources(adapter)))


def make_lora(
    directory: Path, root: Path, *, adapters: int = 2, dtype: PolicyDtype = "float32"
) -> Lora:
    store = PolicyStore(root)
    manifest, assets = import_model(store, directory, dtype)
    base = store.weights_path(manifest.digest)
    policies = [(base, manifest.digest)]
    for seed in range(adapters):
        publication = publish(store, random_adapter(base, manifest.digest, seed=seed, dtype=dtype))
        policies.append((store.weights_path(publication.digest), publication.digest))
    return Lora(store=store, assets=assets, policies=policies)

"""Reads safetensors into float32 tensors; decides that what is loaded is what was digested.

The bytes are hashed and copied from the same memory map, so the digest is that of the weights the
engine runs. Tensors are checked by name and shape before anything is replaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.torch.causal_lm import CausalLM
from dora_pipe.schemas.policy import Tensor, weights_digest
from dora_pipe.store.safetensors_file import mapped, read_entries

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
NAMED_MAX = 3
"""Tensors that an error names."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model directory; empty where there are none (a bare config)."""
    index = model_dir / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise PolicyError(f"{index} does not say where the weights lie") from None
        return [model_dir / Path(str(name)).name for name in sorted(names)]
    return [model_dir / WEIGHTS] if (model_dir / WEIGHTS).exists() else []


def read_tensors(files: Sequence[Path]) -> tuple[dict[str, torch.Tensor], str]:
    """Every tensor as float32, and the weights digest of the bytes as they lie in the files.

    Raises PolicyError for a file that is none, a tensor that stands twice, or no float type.
    """
    tensors: dict[str, torch.Tensor] = {}
    described: list[Tensor] = []
    for path in files:
        entries = read_entries(path)
        with mapped(path) as data:
            for entry in entries:
                if entry.name in tensors:
                    raise PolicyError(f"{path}: tensor {entry.name} stands in another file too")
                with data[entry.start : entry.end] as part:
                    sha256 = hashlib.sha256(part).hexdigest()
                    tensors[entry.name] = _float32(part, entry.dtype, entry.shape, path)
                described.append(
                    Tensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, sha256=sha256)
                )
    return tensors, weights_digest(described)


def other_digest(weights: Path, found: str, version: int | str, digest: str) -> str:
    """What is said of a file that holds other weights than a version's."""
    return f"{weights} has the weights digest {found[:16]}, not {digest[:16]} of version {version}"


def check_tensors(model: CausalLM, tensors: dict[str, torch.Tensor], where: Path) -> None:
    """Raise PolicyError unless these are exactly the tensors of the model.

    A head that the config ties may stand beside the embedding if it is equal; it is dropped.
    """
    check_fit(model.tensors(), {_HEAD: _EMBEDDING} if model.tied else {}, tensors, where)


def check_fit(
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    tensors: dict[str, torch.Tensor],
    where: Path,
) -> None:
    """Raise PolicyError unless these are the tensors of a model; drop a tied one's equal twin."""
    for name, twin in tied.items():
        if name in tensors and twin in tensors:
            if not torch.equal(tensors[name], tensors[twin]):
                raise PolicyError(f"{where}: {name} is tied to {twin}, but they differ")
            del tensors[name]
    _refuse(where, "lacks", shapes.keys() - tensors.keys())
    _refuse(where, "has the unexpected", tensors.keys() - shapes.keys())
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise PolicyError(
                f"{where}: tensor {name} has shape {tuple(tensors[name].shape)}, not {shape}",
                hint="these weights belong to another model than the config",
            )


def random_tensors(model: CausalLM, seed: int) -> Mapping[str, torch.Tensor]:
    """Weights of the model's shapes, drawn from N(0, 0.05) with norms of one; for measurements."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * 0.05
        for name, shape in model.tensors().items()
    }


def _refuse(where: Path, verb: str, names: set[str]) -> None:
    if names:
        some = ", ".join(sorted(names)[:NAMED_MAX])
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        raise PolicyError(
            f"{where} {verb} tensor{'s' * (len(names) > 1)} {some}{more}",
            hint="these weights belong to another model than the config",
        )


def _float32(data: memoryview, dtype: str, shape: tuple[int, ...], where: Path) -> torch.Tensor:
    """A copy of the bytes as a float32 tensor; widening is exact."""
    if dtype == "F32":
        values = np.frombuffer(data, dtype="<f4").copy()
    elif dtype == "F16":
        values = np.frombuffer(data, dtype="<f2").astype(np.float32)
    elif dtype == "BF16":
        values = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        raise PolicyError(f"{where}: weights of type {dtype} are not supported")
    return torch.from_numpy(values).view(shape)

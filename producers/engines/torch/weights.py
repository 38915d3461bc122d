"""Read and verify the tensors of safetensors files.

All checks precede replacement. Tensors are views of the mapped file, so none is held twice.
"""

from __future__ import annotations

import json
import math
import mmap
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final

import torch

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.torch.causal_lm import CausalLM
from dora_pipe.schemas.policy import weights_digest
from dora_pipe.store.carried_tensors import carried_names
from dora_pipe.store.safetensors_file import Entry, read_entries, read_manifest
from dora_pipe.store.verified import digest_of

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
NAMED_MAX = 3

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise PolicyError(f"{index} has no weight_map") from None
        return [model_dir / Path(str(name)).name for name in sorted(names)]
    return [model_dir / WEIGHTS] if (model_dir / WEIGHTS).exists() else []


class OpenWeights:
    """Tensors of safetensors files, mapped on demand. Files may be deleted, but not changed."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises PolicyError for an invalid file, duplicate tensor or unsupported type."""
        self._located: dict[str, tuple[IO[bytes], Entry]] = {}
        held = ExitStack()
        weakref.finalize(self, held.close)  # mapped tensors remain valid
        for path in files:
            entries = read_entries(path)
            file = held.enter_context(path.open("rb"))
            for entry in entries:
                if entry.name in self._located:
                    raise PolicyError(f"{path}: tensor {entry.name} is also in another file")
                if entry.dtype not in _FLOATS:
                    raise PolicyError(f"{path}: weights of type {entry.dtype} are not supported")
                self._located[entry.name] = file, entry

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, (_, entry) in self._located.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        file, entry = self._located[name]
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=_FLOATS[entry.dtype])
        first = entry.start - entry.start % mmap.ALLOCATIONGRANULARITY
        # Private: torch requires writable memory.
        pages = mmap.mmap(file.fileno(), entry.end - first, access=mmap.ACCESS_COPY, offset=first)
        flat = torch.frombuffer(
            pages,
            dtype=_FLOATS[entry.dtype],
            offset=entry.start - first,
            count=math.prod(entry.shape),
        )
        return flat.view(entry.shape)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._located:
            yield name, self[name]

    def __len__(self) -> int:
        return len(self._located)

    def drop(self, name: str) -> None:
        del self._located[name]


def open_weights(
    weights: Path,
    version: int | str,
    digest: str,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    further: range,
) -> OpenWeights:
    """Open a version's weights without `further` layers. Raises PolicyError for another digest or
    shape, ResourceError."""
    opened = OpenWeights([weights])
    check_fit(shapes, tied, opened, weights, further)
    actual = digest_of(weights, digest)
    if actual != digest:
        raise PolicyError(other_digest(weights, actual, version, digest))
    return opened


def open_directory(
    files: Sequence[Path],
    where: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    further: range,
) -> tuple[OpenWeights, str]:
    """Open and digest a directory. Raises PolicyError, ResourceError."""
    opened = OpenWeights(files)
    check_fit(shapes, tied, opened, where, further)
    return opened, weights_digest(
        tensor for path in files for tensor in read_manifest(path).tensors
    )


def other_digest(weights: Path, actual: str, version: int | str, digest: str) -> str:
    return f"{weights} has the weights digest {actual[:16]}, not {digest[:16]} of version {version}"


def tied_tensors(model: CausalLM) -> Mapping[str, str]:
    """Return the tied head, which files may repeat."""
    return {_HEAD: _EMBEDDING} if model.tied else {}


def check_fit(
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    tensors: OpenWeights,
    where: Path,
    further: range,
) -> None:
    """Raise PolicyError unless tensors fit; drop tied duplicates and `further` layers."""
    for name in carried_names(tensors.shapes, further):
        tensors.drop(name)
    present = tensors.shapes
    for name, twin in tied.items():
        if name in present and twin in present:
            if not torch.equal(tensors[name], tensors[twin]):
                raise PolicyError(f"{where}: {name} is tied to {twin}, but they differ")
            tensors.drop(name)
            del present[name]
    _refuse(where, "lacks", shapes.keys() - present.keys())
    _refuse(where, "has the unexpected", present.keys() - shapes.keys())
    for name, shape in shapes.items():
        if present[name] != shape:
            raise PolicyError(
                f"{where}: tensor {name} has shape {present[name]}, not {shape}",
                hint="the weights do not match the config",
            )


def random_tensors(model: CausalLM, seed: int) -> Mapping[str, torch.Tensor]:
    """Return N(0, 0.05) weights and norms of 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.randn(shape, generator=generator) * 0.05
        for name, shape in model.tensors().items()
    }


def _refuse(where: Path, verb: str, names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names)[:NAMED_MAX])
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        raise PolicyError(
            f"{where} {verb} tensor{'s' * (len(names) > 1)} {listed}{more}",
            hint="the weights do not match the config",
        )

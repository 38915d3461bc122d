"""Model directories in and out of the store; decides what is taken over and what is refused.

In: the safetensors shards of a Hugging Face causal LM become one file, sixteen-bit floats become
float32 (what is trained here), a tensor that the config ties to the embedding stands once, and the
config and tokenizer files are kept as they came. Out: a directory that `from_pretrained` loads; of
a LoRA policy with merged weights, and the adapter beside them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dora_pipe.core.errors import NonFinite, PolicyError, ResourceError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.adapters import FOLDER, base_of, read_adapter, write_merged, write_peft
from dora_pipe.store.safetensors_file import (
    WEIGHTS_HINT,
    Entry,
    TensorSource,
    manifest_in_memory,
    mapped,
    read_entries,
    write_tensors,
)
from dora_pipe.store.store import PolicyStore

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
JSON_BYTES_MAX: Final = 64 * 1024 * 1024
ASSET_BYTES_MAX: Final = 1024 * 1024 * 1024

_ASSET_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_EMBEDDING: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_DERIVED: Final = (".rotary_emb.inv_freq",)
"""Ends of tensors that older models stored although their config says them already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Located:
    """A tensor and the file it lies in."""

    path: Path
    entry: Entry


def weights_digest(model_dir: Path) -> str:
    """The digest that the weights of a directory would have in a store. Raises PolicyError."""
    with _sources(model_dir) as sources:
        return manifest_in_memory(sources).digest


def import_model(store: PolicyStore, model_dir: Path) -> tuple[Manifest, str]:
    """Put a model directory into a store: its manifest and the digest of its assets.

    Raises PolicyError for a directory that is not a model, ResourceError without room.
    """
    with _sources(model_dir) as sources:
        try:
            manifest = store.publish_weights(lambda path: write_tensors(path, sources))
        except NonFinite as error:
            raise PolicyError(f"{model_dir}: {error.message}", hint=WEIGHTS_HINT) from None
    return manifest, store.publish_assets(asset_files(model_dir))


def export_model(store: PolicyStore, digest: str, assets_digest: str, directory: Path) -> None:
    """Write a policy as a directory that transformers' `from_pretrained` loads.

    Files of the same names are replaced. Raises PolicyError when the store's files are not there or
    not what they were.
    """
    store.verify(digest)
    assets = store.assets(assets_digest)
    if not assets.is_dir():
        raise PolicyError(f"no config and tokenizer files at {assets}")
    weights = store.weights_path(digest)
    base = base_of(weights)
    if base is None:
        write_model_dir(directory, assets, lambda path: shutil.copyfile(weights, path))
        return
    store.verify(base)
    whole, adapter = store.weights_path(base), read_adapter(weights, digest=digest)
    write_model_dir(directory, assets, lambda path: write_merged(whole, adapter, path))
    try:
        write_peft(directory / FOLDER, adapter)
    except OSError as error:
        raise ResourceError(f"cannot write {directory}: {error.strerror or error}") from error


def write_model_dir(directory: Path, assets: Path, write_weights: Callable[[Path], object]) -> None:
    """A model directory from config and tokenizer files and float32 weights.

    Raises ResourceError when it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in asset_files(assets):
            shutil.copyfile(file, directory / file.name)
        text = json.dumps(_float32(read_config(assets)), indent=2, sort_keys=True)
        (directory / CONFIG).write_text(text + "\n")
        write_weights(directory / WEIGHTS)
    except OSError as error:
        raise ResourceError(f"cannot write {directory}: {error.strerror or error}") from error


def asset_files(model_dir: Path) -> list[Path]:
    """Config and tokenizer files of a model directory, sorted by name. Raises PolicyError."""
    found = sorted(
        path
        for path in model_dir.iterdir()
        if path.is_file()
        and path.suffix in _ASSET_SUFFIXES
        and not path.name.endswith(".safetensors.index.json")
        and not path.name.startswith(".")
    )
    for path in found:
        if path.stat().st_size > ASSET_BYTES_MAX:
            raise PolicyError(f"{path} is too large for a config or tokenizer file")
    return found


def read_config(model_dir: Path) -> dict[str, Any]:
    """The model's config.json. Raises PolicyError."""
    if not model_dir.is_dir():
        raise PolicyError(f"no model directory at {model_dir}")
    return _read_json(model_dir / CONFIG)


@contextmanager
def _sources(model_dir: Path) -> Iterator[list[TensorSource]]:
    """The tensors of a model directory, as they are stored. Raises PolicyError."""
    config = read_config(model_dir)
    tensors = _tensors(model_dir)
    with ExitStack() as stack:
        pages = {
            path: stack.enter_context(mapped(path))
            for path in sorted({one.path for one in tensors.values()})
        }
        _drop_tied(config, tensors, pages)
        yield [_source(one, pages[one.path]) for one in tensors.values()]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise PolicyError(f"{path} is larger than {JSON_BYTES_MAX} bytes")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise PolicyError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise PolicyError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PolicyError(f"{path} is not a JSON object")
    return value


def _tensors(model_dir: Path) -> dict[str, _Located]:
    """Every tensor of the directory by name. Raises PolicyError if one is there twice."""
    found: dict[str, _Located] = {}
    for path in _weight_files(model_dir):
        for entry in read_entries(path):
            if entry.name.endswith(_DERIVED):
                continue
            if entry.name in found:
                raise PolicyError(f"tensor {entry.name!r} stands in {path} and in another shard")
            found[entry.name] = _Located(path=path, entry=entry)
    return found


def _weight_files(model_dir: Path) -> Iterator[Path]:
    if (model_dir / INDEX).exists():
        placed = _read_json(model_dir / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise PolicyError(f"{model_dir / INDEX} has no weight_map")
        for name in sorted({str(name) for name in placed.values()}):
            if Path(name).name != name:
                raise PolicyError(f"{model_dir / INDEX} names a file outside: {name!r}")
            yield model_dir / name
    elif (model_dir / WEIGHTS).exists():
        yield model_dir / WEIGHTS
    else:
        raise PolicyError(
            f"{model_dir} has no {WEIGHTS}",
            hint="pickled weights are not read; save the model again with save_pretrained",
        )


def _drop_tied(
    config: Mapping[str, Any],
    tensors: dict[str, _Located],
    pages: Mapping[Path, memoryview],
) -> None:
    """A head that the config ties to the embedding is the embedding: it stands once."""
    embeddings = [name for name in tensors if name.endswith(_EMBEDDING)]
    if not config.get("tie_word_embeddings") or _HEAD not in tensors or not embeddings:
        return
    head, embedding = tensors[_HEAD], tensors[embeddings[0]]
    if _bytes(head, pages[head.path]) != _bytes(embedding, pages[embedding.path]):
        raise PolicyError(
            f"the config ties {_HEAD} to {embeddings[0]}, but they differ",
            hint="save the model again with transformers, or set tie_word_embeddings to false",
        )
    del tensors[_HEAD]


def _bytes(located: _Located, page: memoryview) -> memoryview:
    return page[located.entry.start : located.entry.end]


def _source(located: _Located, page: memoryview) -> TensorSource:
    entry = located.entry
    widened = entry.dtype in ("F16", "BF16")

    def data() -> bytes | memoryview:
        with _bytes(located, page) as part:
            return _widen(entry.dtype, part) if widened else bytes(part)

    if entry.dtype.startswith("F8"):
        raise PolicyError(f"tensor {entry.name!r} has type {entry.dtype}; train from a wider copy")
    dtype = "F32" if widened else entry.dtype
    return TensorSource(name=entry.name, dtype=dtype, shape=entry.shape, data=data)


def _widen(dtype: str, data: memoryview) -> bytes:
    """Sixteen-bit floats as float32; exact for both kinds."""
    if dtype == "F16":
        return np.frombuffer(data, dtype="<f2").astype("<f4").tobytes()
    return (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).astype("<u4").tobytes()


def _float32(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the type of the weights it will lie beside."""
    changed = dict(config)
    for key in ("dtype", "torch_dtype"):
        if key in changed:
            changed[key] = "float32"
    return changed

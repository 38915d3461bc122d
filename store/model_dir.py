"""Import and export of model directories.

Import merges the safetensors shards of a Hugging Face causal LM, converts floats to float32 or
bfloat16, and drops tied heads. Export writes a directory for `from_pretrained`, with LoRA merged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from dora_pipe.core.errors import NonFinite, PolicyError, ResourceError
from dora_pipe.core.system.own_code import nearest
from dora_pipe.schemas.policy import Manifest, PolicyDtype
from dora_pipe.store.adapters import FOLDER, base_of, read_adapter, write_merged, write_peft
from dora_pipe.store.safetensors_file import (
    WEIGHTS_HINT,
    Entry,
    TensorSource,
    manifest_in_memory,
    mapped,
    narrowed,
    read_entries,
    widened,
    write_tensors,
)
from dora_pipe.store.store import PolicyStore

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
MODEL_HINT: Final = (
    "a model's folder holds config.json, tokenizer.json and *.safetensors, as `save_pretrained`"
    " writes them; nothing is downloaded"
)
POSITIONS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
"""Config keys of the context length by family; the smallest value counts."""
STRETCHED_BEYOND: Final = ("linear", "dynamic", "ntk")
"""RoPE scalings that extend the context."""
INDEX: Final = "model.safetensors.index.json"
JSON_BYTES_MAX: Final = 64 * 1024 * 1024
ASSET_BYTES_MAX: Final = 1024 * 1024 * 1024

_ASSET_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_EMBEDDING: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_CONVERTED: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Converted dtypes; others remain."""
_STORED: Final[Mapping[PolicyDtype, str]] = {"float32": "F32", "bfloat16": "BF16"}
_DERIVED: Final = (".rotary_emb.inv_freq",)
"""Redundant tensors of older models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Located:
    path: Path
    entry: Entry


def weights_digest(model_dir: Path, dtype: PolicyDtype = "float32") -> str:
    """Return the weights' digest in a store. Raises PolicyError."""
    with _sources(model_dir, dtype) as sources:
        return manifest_in_memory(sources).digest


def config_dtype(model_dir: Path) -> str:
    """Return the configured dtype, or empty. Raises PolicyError."""
    config = read_config(model_dir)
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def import_model(
    store: PolicyStore, model_dir: Path, dtype: PolicyDtype = "float32"
) -> tuple[Manifest, str]:
    """Import a model directory; return its manifest and assets digest.

    Converts floats of 16 and 32 bits, rounding to nearest. Raises PolicyError for an invalid
    directory, ResourceError for a full disk.
    """
    with _sources(model_dir, dtype) as sources:
        try:
            manifest = store.publish_weights(lambda path: write_tensors(path, sources))
        except NonFinite as error:
            raise PolicyError(f"{model_dir}: {error.message}", hint=WEIGHTS_HINT) from None
    return manifest, store.publish_assets(asset_files(model_dir))


def write_as(weights: Path, dtype: PolicyDtype, path: Path) -> Manifest:
    """Rewrite weights in another dtype. Raises PolicyError, OSError."""
    entries = [_Located(path=weights, entry=entry) for entry in read_entries(weights)]
    with mapped(weights) as page:
        return write_tensors(path, [_source(entry, page, dtype) for entry in entries])


def export_model(store: PolicyStore, digest: str, assets_digest: str, directory: Path) -> None:
    """Write a policy as a directory for `from_pretrained`, replacing files.

    Raises PolicyError for missing or damaged files of the store.
    """
    dtype = store.verify(digest).dtype
    assets = store.assets(assets_digest)
    if not assets.is_dir():
        raise PolicyError(f"no config and tokenizer files at {assets}")
    write_policy_dir(store, store.weights(digest), digest, dtype, assets, directory)


def write_policy_dir(
    store: PolicyStore,
    weights: Path,
    digest: str,
    dtype: PolicyDtype,
    assets: Path,
    directory: Path,
) -> None:
    """Write weights as a model directory, with adapters merged. Raises PolicyError,
    ResourceError."""
    base = base_of(weights)
    if base is None:
        copy = partial(shutil.copyfile, weights)
        write_model_dir(directory, assets, copy, dtype)
        return
    store.verify(base)
    base_weights, adapter = store.weights(base), read_adapter(weights, digest=digest)
    write_model_dir(
        directory, assets, lambda path: write_merged(base_weights, adapter, path), dtype
    )
    try:
        write_peft(directory / FOLDER, adapter)
    except OSError as error:
        raise ResourceError(f"cannot write {directory}: {error.strerror or error}") from error


def write_model_dir(
    directory: Path,
    assets: Path,
    write_weights: Callable[[Path], object],
    dtype: PolicyDtype = "float32",
) -> None:
    """Write config, tokenizer and weights. Raises ResourceError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in asset_files(assets):
            shutil.copyfile(file, directory / file.name)
        text = json.dumps(_of_type(read_config(assets), dtype), indent=2, sort_keys=True)
        (directory / CONFIG).write_text(text + "\n")
        write_weights(directory / WEIGHTS)
    except OSError as error:
        raise ResourceError(f"cannot write {directory}: {error.strerror or error}") from error


def asset_files(model_dir: Path) -> list[Path]:
    """Return sorted config and tokenizer files. Raises PolicyError."""
    paths = sorted(
        path
        for path in model_dir.iterdir()
        if path.is_file()
        and path.suffix in _ASSET_SUFFIXES
        and not path.name.endswith(".safetensors.index.json")
        and not path.name.startswith(".")
    )
    for path in paths:
        if path.stat().st_size > ASSET_BYTES_MAX:
            raise PolicyError(f"{path} is too large for a config or tokenizer file")
    return paths


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return config.json. Raises PolicyError."""
    if not model_dir.is_dir():
        raise PolicyError(f"no model directory at {model_dir}", hint=_nearest_folder(model_dir))
    return _read_json(model_dir / CONFIG)


def embedding_rows(config: Mapping[str, Any]) -> int | None:
    """Return the rows of the token embedding, or None."""
    nested = config.get("text_config")
    rows = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    return rows if isinstance(rows, int) else None


def _nearest_folder(missing: Path) -> str:
    folder = next(parent for parent in missing.absolute().parents if parent.is_dir())
    name = missing.absolute().relative_to(folder).parts[0]
    with suppress(OSError):  # unreadable directory
        if near := nearest(name, [child.name for child in folder.iterdir() if child.is_dir()]):
            return f"in {folder}: {near}"
    return MODEL_HINT


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the maximum context length in tokens, None if unset.

    As in vLLM, a RoPE factor multiplies it unless the configured value includes the factor.
    """
    lengths = [config[key] for key in POSITIONS if isinstance(config.get(key), int)]
    if not lengths:
        return None
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = fields.get("rope_type", fields.get("type", "default"))
    factor = fields.get("factor") if kind in STRETCHED_BEYOND else None
    return int(min(lengths) * (factor if isinstance(factor, int | float) else 1))


@contextmanager
def _sources(model_dir: Path, dtype: PolicyDtype) -> Iterator[list[TensorSource]]:
    config = read_config(model_dir)
    tensors = _tensors(model_dir)
    with ExitStack() as stack:
        pages = {
            path: stack.enter_context(mapped(path))
            for path in sorted({tensor.path for tensor in tensors.values()})
        }
        _drop_tied(config, tensors, pages)
        yield [_source(tensor, pages[tensor.path], dtype) for tensor in tensors.values()]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise PolicyError(f"{path} is larger than {JSON_BYTES_MAX} bytes")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise PolicyError(f"{path.parent} has no {path.name}", hint=MODEL_HINT) from None
    except OSError as error:
        raise PolicyError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PolicyError(f"{path} is not a JSON object")
    return value


def _tensors(model_dir: Path) -> dict[str, _Located]:
    tensors: dict[str, _Located] = {}
    for path in _weight_files(model_dir):
        for entry in read_entries(path):
            if entry.name.endswith(_DERIVED):
                continue
            if entry.name in tensors:
                raise PolicyError(f"tensor {entry.name!r} is in {path} and in another shard")
            tensors[entry.name] = _Located(path=path, entry=entry)
    return tensors


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
            hint="pickled weights are not supported; save the model with save_pretrained",
        )


def _drop_tied(
    config: Mapping[str, Any],
    tensors: dict[str, _Located],
    pages: Mapping[Path, memoryview],
) -> None:
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


def _source(located: _Located, page: memoryview, dtype: PolicyDtype) -> TensorSource:
    entry = located.entry
    stored = _STORED[dtype] if entry.dtype in _CONVERTED else entry.dtype

    def data() -> bytes | memoryview:
        with _bytes(located, page) as part:
            return _converted(entry.dtype, stored, part)

    if entry.dtype.startswith("F8"):
        raise PolicyError(f"tensor {entry.name!r} has type {entry.dtype}; use a wider copy")
    return TensorSource(name=entry.name, dtype=stored, shape=entry.shape, data=data)


def _converted(dtype: str, stored: str, data: memoryview) -> bytes:
    if dtype == stored:
        return bytes(data)
    given = np.frombuffer(data, dtype=_CONVERTED[dtype])
    numbers = widened(given) if dtype == "BF16" else given.astype(np.float32)
    return (numbers if stored == "F32" else narrowed(numbers)).tobytes()


def _of_type(config: Mapping[str, Any], dtype: PolicyDtype) -> dict[str, Any]:
    changed = dict(config)
    for key in ("dtype", "torch_dtype"):
        if key in changed:
            changed[key] = dtype
    return changed


def unassigned_ids(directory: Path) -> tuple[int, ...]:
    """Return the token ids with an embedding row but no token, sorted; engines never sample them
    and the trainer masks them. Empty without tokenizer.json or config.json. Raises PolicyError."""
    file = directory / "tokenizer.json"
    there = file.is_file() and (directory / CONFIG).is_file()
    rows = embedding_rows(read_config(directory)) if there else None
    if rows is None:
        return ()
    return tuple(sorted(set(range(rows)) - token_ids(file)))


def token_ids(file: Path) -> frozenset[int]:
    """Return all ids of a tokenizer.json. Raises PolicyError."""
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_buffer(file.read_bytes())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{file} is not a tokenizer: {error}") from None
    return frozenset(backend.get_vocab(with_added_tokens=True).values())

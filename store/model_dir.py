"""Model directories in and out of the store; decides what is taken over and what is refused.

In: the safetensors shards of a Hugging Face causal LM become one file, floats become what the run
publishes (float32, or bfloat16), a tensor that the config ties to the embedding stands once, and
the config and tokenizer files are kept as they came. Out: a directory that `from_pretrained`
loads; of a LoRA policy with merged weights, and the adapter beside them.
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
from dora_pipe.core.own_code import nearest
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
"""Keys of a config that say how many positions a model has, by family; the least one counts."""
STRETCHED_BEYOND: Final = ("linear", "dynamic", "ntk")
"""Scalings of rotary positions by which a model has more positions than its config says."""
INDEX: Final = "model.safetensors.index.json"
JSON_BYTES_MAX: Final = 64 * 1024 * 1024
ASSET_BYTES_MAX: Final = 1024 * 1024 * 1024

_ASSET_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_EMBEDDING: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
_CONVERTED: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Types that become what is published; wider ones and integers stay what they are."""
_STORED: Final[Mapping[PolicyDtype, str]] = {"float32": "F32", "bfloat16": "BF16"}
_DERIVED: Final = (".rotary_emb.inv_freq",)
"""Ends of tensors that older models stored although their config says them already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Located:
    """A tensor and the file it lies in."""

    path: Path
    entry: Entry


def weights_digest(model_dir: Path, dtype: PolicyDtype = "float32") -> str:
    """The digest that the weights of a directory would have in a store. Raises PolicyError."""
    with _sources(model_dir, dtype) as sources:
        return manifest_in_memory(sources).digest


def config_dtype(model_dir: Path) -> str:
    """What a model's config says of the type of its weights; empty where it does not. Raises
    PolicyError."""
    config = read_config(model_dir)
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def import_model(
    store: PolicyStore, model_dir: Path, dtype: PolicyDtype = "float32"
) -> tuple[Manifest, str]:
    """Put a model directory into a store: its manifest and the digest of its assets.

    Floats of 32 and 16 bits become `dtype`: exactly where that is wider, else rounded to nearest.
    Raises PolicyError for a directory that is not a model, ResourceError without room.
    """
    with _sources(model_dir, dtype) as sources:
        try:
            manifest = store.publish_weights(lambda path: write_tensors(path, sources))
        except NonFinite as error:
            raise PolicyError(f"{model_dir}: {error.message}", hint=WEIGHTS_HINT) from None
    return manifest, store.publish_assets(asset_files(model_dir))


def write_as(weights: Path, dtype: PolicyDtype, path: Path) -> Manifest:
    """Whole weights of a store once more, in a type as `import_model` has it. Raises PolicyError,
    OSError."""
    entries = [_Located(path=weights, entry=one) for one in read_entries(weights)]
    with mapped(weights) as page:
        return write_tensors(path, [_source(one, page, dtype) for one in entries])


def export_model(store: PolicyStore, digest: str, assets_digest: str, directory: Path) -> None:
    """Write a policy as a directory that transformers' `from_pretrained` loads.

    Files of the same names are replaced. Raises PolicyError when the store's files are not there or
    not what they were.
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
    """Write weights as a model directory; those of an adapter merged into its base in the store.

    Raises PolicyError, ResourceError.
    """
    base = base_of(weights)
    if base is None:
        copy = partial(shutil.copyfile, weights)
        write_model_dir(directory, assets, copy, dtype)
        return
    store.verify(base)
    whole, adapter = store.weights(base), read_adapter(weights, digest=digest)
    write_model_dir(directory, assets, lambda path: write_merged(whole, adapter, path), dtype)
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
    """A model directory from config and tokenizer files and weights of this type.

    Raises ResourceError when it cannot be written.
    """
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
        raise PolicyError(f"no model directory at {model_dir}", hint=_nearest_folder(model_dir))
    return _read_json(model_dir / CONFIG)


def embedding_rows(config: Mapping[str, Any]) -> int | None:
    """Rows of the token embedding of a model of this config.json; None where it does not say."""
    nested = config.get("text_config")
    rows = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, dict) else None)
    return rows if isinstance(rows, int) else None


def _nearest_folder(missing: Path) -> str:
    """A hint: the nearest folder of a similar name, else what a model's folder holds."""
    folder = next(one for one in missing.absolute().parents if one.is_dir())
    name = missing.absolute().relative_to(folder).parts[0]
    with suppress(OSError):  # a folder that may not be listed
        if near := nearest(name, [one.name for one in folder.iterdir() if one.is_dir()]):
            return f"in {folder}: {near}"
    return MODEL_HINT


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence that a model of this config.json has positions for; None where
    it does not say. As vLLM reads it: a factor by which rotary positions are stretched counts but
    where the config's number is of what is stretched already."""
    found = [config[key] for key in POSITIONS if isinstance(config.get(key), int)]
    if not found:
        return None
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = fields.get("rope_type", fields.get("type", "default"))
    factor = fields.get("factor") if kind in STRETCHED_BEYOND else None
    return int(min(found) * (factor if isinstance(factor, int | float) else 1))


@contextmanager
def _sources(model_dir: Path, dtype: PolicyDtype) -> Iterator[list[TensorSource]]:
    """The tensors of a model directory, as they are stored. Raises PolicyError."""
    config = read_config(model_dir)
    tensors = _tensors(model_dir)
    with ExitStack() as stack:
        pages = {
            path: stack.enter_context(mapped(path))
            for path in sorted({one.path for one in tensors.values()})
        }
        _drop_tied(config, tensors, pages)
        yield [_source(one, pages[one.path], dtype) for one in tensors.values()]


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


def _source(located: _Located, page: memoryview, dtype: PolicyDtype) -> TensorSource:
    entry = located.entry
    wanted = _STORED[dtype] if entry.dtype in _CONVERTED else entry.dtype

    def data() -> bytes | memoryview:
        with _bytes(located, page) as part:
            return _converted(entry.dtype, wanted, part)

    if entry.dtype.startswith("F8"):
        raise PolicyError(f"tensor {entry.name!r} has type {entry.dtype}; train from a wider copy")
    return TensorSource(name=entry.name, dtype=wanted, shape=entry.shape, data=data)


def _converted(dtype: str, wanted: str, data: memoryview) -> bytes:
    """The bytes of numbers in another type, by way of float32."""
    if dtype == wanted:
        return bytes(data)
    given = np.frombuffer(data, dtype=_CONVERTED[dtype])
    numbers = widened(given) if dtype == "BF16" else given.astype(np.float32)
    return (numbers if wanted == "F32" else narrowed(numbers)).tobytes()


def _of_type(config: Mapping[str, Any], dtype: PolicyDtype) -> dict[str, Any]:
    """The config with the type of the weights it will lie beside."""
    changed = dict(config)
    for key in ("dtype", "torch_dtype"):
        if key in changed:
            changed[key] = dtype
    return changed

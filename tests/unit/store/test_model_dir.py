"""Tests of model directories: stored and exported for transformers."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from dora_pipe.consumers.learners.torch.model import read_tensor
from dora_pipe.core.errors import NonFinite, PolicyError
from dora_pipe.schemas.policy import Manifest, PolicyDtype
from dora_pipe.store.model_dir import export_model, import_model, write_as
from dora_pipe.store.safetensors_file import (
    TensorSource,
    mapped,
    read_entries,
    refuse_non_finite_file,
    write_tensors,
)
from dora_pipe.store.store import PolicyStore


def source(name: str, *values: float) -> TensorSource:
    data = np.array(values, dtype="<f4").tobytes()
    return TensorSource(name=name, dtype="F32", shape=(len(values),), data=lambda: data)


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    return PolicyStore(tmp_path / "policies")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("not taken over")
    write_tensors(path / "model.safetensors", [source("model.embed_tokens.weight", 1.0)])
    return path


def shard(model_dir: Path, **files: list[TensorSource]) -> None:
    (model_dir / "model.safetensors").unlink()
    weight_map = {}
    for name, sources in files.items():
        write_tensors(model_dir / f"{name}.safetensors", sources)
        weight_map.update({source.name: f"{name}.safetensors" for source in sources})
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_shards_become_one_file_with_the_digest_of_the_unsharded_model(
    store: PolicyStore, model_dir: Path
) -> None:
    tensors = [source("a", 1, 2), source("b", 3), source("c", 4)]
    write_tensors(model_dir / "model.safetensors", tensors)
    full, assets = import_model(store, model_dir)
    shard(model_dir, one=[tensors[2], tensors[0]], two=[tensors[1]])
    sharded, assets_again = import_model(store, model_dir)
    assert sharded == full
    assert assets_again == assets
    assert store.verify(full.digest) == full
    names = [path.name for path in sorted(store.assets_path(assets).iterdir())]
    assert names == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        ("F32", np.array([0x3F800000, 0x7FFFFFFF, 0xFF800000], dtype="<u4").tobytes()),
        ("F16", np.array([1.0, np.nan, np.inf], dtype="<f2").tobytes()),
        ("BF16", np.array([0x3F80, 0x7FC0, 0xFF80], dtype="<u2").tobytes()),
        ("F64", np.array([1.0, np.nan, np.inf], dtype="<f8").tobytes()),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_tensor_and_count(
    store: PolicyStore, model_dir: Path, dtype: str, data: bytes, published: PolicyDtype
) -> None:
    plant(model_dir / "model.safetensors", dtype, data)
    with pytest.raises(PolicyError, match=r"tensor 'odd': 2 of 3 numbers are NaN") as refused:
        import_model(store, model_dir, published)
    assert str(model_dir) in refused.value.message
    assert refused.value.hint
    assert store.everything() == []
    with pytest.raises(PolicyError, match=r"tensor 'odd': 2 of 3 numbers"):
        refuse_non_finite_file(model_dir / "model.safetensors")


def plant(path: Path, dtype: str, data: bytes) -> None:
    tensor = {"dtype": dtype, "shape": [3], "data_offsets": [0, len(data)]}
    header = json.dumps({"odd": tensor}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_floats_become_bfloat16_as_torch_rounds_them(store: PolicyStore, model_dir: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    numbers = bits.view("<f4")
    numbers = numbers[np.isfinite(numbers) & (np.abs(numbers) < 3e38)]
    ties = (np.arange(64, dtype="<u4") << 16) + 0x3F808000
    numbers = np.concatenate([numbers, ties.view("<f4"), np.array([0.0, -0.0, 1e-45], "<f4")])
    half = np.array([0.1, -65504.0, 6e-8], dtype="<f2")
    values = np.arange(3, dtype="<i8")
    write_tensors(
        model_dir / "model.safetensors",
        [
            source("single", *numbers.tolist()),
            TensorSource(name="half", dtype="F16", shape=(3,), data=half.tobytes),
            TensorSource(name="whole", dtype="I64", shape=(3,), data=values.tobytes),
        ],
    )
    manifest, _ = import_model(store, model_dir, "bfloat16")
    assert manifest.dtype == "bfloat16"
    expected = {
        "single": torch.from_numpy(numbers.astype("<f4")).to(torch.bfloat16),
        "half": torch.from_numpy(half).to(torch.bfloat16),
        "whole": torch.from_numpy(values),
    }
    stored = store.weights_path(manifest.digest)
    with mapped(stored) as data:
        for entry in read_entries(stored):
            assert torch.equal(read_tensor(data, entry), expected[entry.name]), entry.name
    again = store.publish_weights(lambda path: write_as(stored, "bfloat16", path))
    assert again == manifest


def test_a_step_whose_weights_are_not_finite_publishes_nothing(store: PolicyStore) -> None:
    def write(path: Path) -> Manifest:
        return write_tensors(path, [source("fine", 1.0), source("odd", 1.0, float("inf"))])

    with pytest.raises(NonFinite, match="tensor 'odd': 1 of 2 numbers"):
        store.publish_weights(write)
    assert store.everything() == []


def test_head_tied_to_the_embedding_stands_once(store: PolicyStore, model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    tied = [source("model.embed_tokens.weight", 1.0, 2.0), source("lm_head.weight", 1.0, 2.0)]
    write_tensors(model_dir / "model.safetensors", tied)
    manifest, _ = import_model(store, model_dir)
    assert [tensor.name for tensor in manifest.tensors] == ["model.embed_tokens.weight"]


def test_tied_head_that_differs_is_refused(store: PolicyStore, model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    torn = [source("model.embed_tokens.weight", 1.0), source("lm_head.weight", 2.0)]
    write_tensors(model_dir / "model.safetensors", torn)
    with pytest.raises(PolicyError, match="but they differ"):
        import_model(store, model_dir)


def test_directory_without_safetensors_is_refused_with_a_hint(
    store: PolicyStore, model_dir: Path
) -> None:
    (model_dir / "model.safetensors").unlink()
    (model_dir / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(PolicyError, match=r"has no model\.safetensors") as caught:
        import_model(store, model_dir)
    assert "pickled" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000])
def test_config_that_is_no_object_is_refused(
    store: PolicyStore, model_dir: Path, text: str
) -> None:
    (model_dir / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(PolicyError, match=r"config\.json is not"):
        import_model(store, model_dir)


def test_index_that_points_outside_is_refused(store: PolicyStore, model_dir: Path) -> None:
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(PolicyError, match="names a file outside"):
        import_model(store, model_dir)


def test_missing_directory_and_missing_shard_are_named(
    store: PolicyStore, model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match="no model directory at"):
        import_model(store, tmp_path / "nowhere")
    shard(model_dir, one=[source("a", 1)])
    (model_dir / "one.safetensors").unlink()
    with pytest.raises(PolicyError, match=r"no weights at .*one\.safetensors"):
        import_model(store, model_dir)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_gives_the_same_weights_and_a_config_of_their_type(
    store: PolicyStore, model_dir: Path, tmp_path: Path, dtype: PolicyDtype
) -> None:
    manifest, assets = import_model(store, model_dir, dtype)
    export_model(store, manifest.digest, assets, tmp_path / "out")
    again, _ = import_model(PolicyStore(tmp_path / "other"), tmp_path / "out", dtype)
    assert again == manifest
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    kept = json.loads((store.assets_path(assets) / "config.json").read_text())
    assert kept["dtype"] == "bfloat16"


def test_export_of_changed_weights_is_refused(
    store: PolicyStore, model_dir: Path, tmp_path: Path
) -> None:
    manifest, assets = import_model(store, model_dir)
    path = store.weights_path(manifest.digest)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(PolicyError, match="holds other weights"):
        export_model(store, manifest.digest, assets, tmp_path / "out")

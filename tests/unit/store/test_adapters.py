"""Tests of adapter files: digests, rejections, merge, export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.store.adapters import (
    BASE,
    SCALE,
    Adapter,
    base_of,
    read_adapter,
    stands_on,
    write_merged,
    write_peft,
)
from dora_pipe.store.safetensors_file import (
    TensorSource,
    mapped,
    narrowed,
    read_entries,
    read_manifest,
    widened,
    write_tensors,
)
from dora_pipe.store.store import PolicyStore
from tests.support.adapters import adapter_sources, publish, random_adapter

SHAPES = {
    "model.embed_tokens.weight": (20, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
}


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    return PolicyStore(tmp_path / "policies")


def base_weights(store: PolicyStore, seed: int = 0, dtype: PolicyDtype = "float32") -> str:
    chance = np.random.default_rng(seed)

    def source(name: str, shape: tuple[int, ...]) -> TensorSource:
        numbers = chance.standard_normal(shape).astype("<f4")
        kind = "F32" if dtype == "float32" else "BF16"
        data = (numbers if dtype == "float32" else narrowed(numbers)).tobytes()
        return TensorSource(name=name, dtype=kind, shape=shape, data=lambda: data)

    sources = [source(name, shape) for name, shape in SHAPES.items()]
    return store.publish_weights(lambda path: write_tensors(path, sources)).digest


def adapter_on(store: PolicyStore, base: str, seed: int = 0) -> Adapter:
    return random_adapter(store.weights_path(base), base, seed=seed)


def test_adapter_comes_back_as_it_was_and_names_its_base(store: PolicyStore) -> None:
    base = base_weights(store)
    adapter = adapter_on(store, base)
    manifest = publish(store, adapter)
    path = store.weights_path(manifest.digest)
    actual_adapter = read_adapter(path, digest=manifest.digest)
    assert (actual_adapter.base, actual_adapter.scale, actual_adapter.rank) == (base, 2.0, 4)
    assert actual_adapter.pairs.keys() == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
    }
    for layer, pair in actual_adapter.pairs.items():
        for mine, theirs in zip(pair, adapter.pairs[layer], strict=True):
            assert np.array_equal(mine, theirs)
    assert base_of(path) == base
    assert base_of(store.weights_path(base)) is None
    assert stands_on(manifest, base)
    assert not stands_on(manifest, "ab" * 32)
    assert not stands_on(read_manifest(store.weights_path(base)), base)


def test_merged_with_a_base_in_bfloat16_a_number_is_rounded_once(
    store: PolicyStore, tmp_path: Path
) -> None:
    base = base_weights(store, dtype="bfloat16")
    path = tmp_path / "merged"
    adapter = random_adapter(store.weights_path(base), base, seed=0, dtype="bfloat16")
    assert write_merged(store.weights_path(base), adapter, path).dtype == "bfloat16"
    before, after = (patterns(entry) for entry in (store.weights_path(base), path))
    for name, bits in before.items():
        pair = adapter.pairs.get(name.removesuffix(".weight"))
        if pair is None:
            assert np.array_equal(after[name], bits)
            continue
        a, b = (side.astype(np.float64) for side in pair)
        exact = widened(bits).astype(np.float64).reshape(len(b), -1) + 2.0 * (b @ a)
        _assert_nearest(after[name].reshape(exact.shape), exact)


@given(st.lists(st.floats(-1e38, 1e38, allow_nan=False), min_size=1, max_size=20))
@example([1.0 + 2**-8 + 2**-40, 1.0 + 2**-8 - 2**-40, 1.0 + 2**-8, -1e-45, 0.0])
def test_numbers_of_any_width_are_rounded_to_the_nearest_once(numbers: list[float]) -> None:
    wide = np.array(numbers)
    _assert_nearest(narrowed(wide), wide)
    single = wide.astype(np.float32)
    _assert_nearest(narrowed(single), single.astype(np.float64))
    assert np.array_equal(narrowed(widened(narrowed(wide))), narrowed(wide))


def _assert_nearest(bits: np.ndarray, exact: np.ndarray) -> None:
    result = np.abs(widened(bits).astype(np.float64) - exact)
    for step in (-1, 1):
        beside = (bits.astype(np.int64) + step).clip(0, 0xFFFF).astype(np.uint16)
        numbers = widened(beside).astype(np.float64)
        other = np.where(np.isfinite(numbers), np.abs(numbers - exact), np.inf)
        assert bool((result <= other).all())
        assert not bool(((result == other) & (bits % 2 == 1) & (beside != bits)).any())


def patterns(path: Path) -> dict[str, np.ndarray]:
    with mapped(path) as data:
        return {
            entry.name: np.frombuffer(bytes(data[entry.start : entry.end]), "<u2")
            for entry in read_entries(path)
        }


def test_merged_weights_are_the_base_and_the_product(store: PolicyStore, tmp_path: Path) -> None:
    base = base_weights(store)
    adapter = adapter_on(store, base)
    path = tmp_path / "merged.safetensors"
    write_merged(store.weights_path(base), adapter, path)
    before, after = tensors(store.weights_path(base)), tensors(path)
    assert before.keys() == after.keys()
    for name, matrix in before.items():
        pair = adapter.pairs.get(name.removesuffix(".weight"))
        expected = matrix if pair is None else matrix + 2.0 * (pair[1] @ pair[0])
        assert np.allclose(after[name], expected, atol=1e-5), name
        assert (pair is None) == np.array_equal(after[name], matrix)


def test_exported_adapter_has_the_names_shapes_and_keys_that_peft_reads(
    store: PolicyStore, tmp_path: Path
) -> None:
    adapter = adapter_on(store, base_weights(store))
    out = tmp_path / "adapter"
    write_peft(out, adapter)
    assert {path.name for path in out.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    shapes = {entry.name: entry.shape for entry in read_entries(out / "adapter_model.safetensors")}
    assert shapes == {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, 8),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (8, 4),
        "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": (4, 12),
        "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight": (8, 4),
    }
    actual_tensors = tensors(out / "adapter_model.safetensors")
    for layer, (a, b) in adapter.pairs.items():
        assert np.array_equal(actual_tensors[f"base_model.model.{layer}.lora_A.weight"], a)
        assert np.array_equal(actual_tensors[f"base_model.model.{layer}.lora_B.weight"], b)
    data = (out / "adapter_model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"}
    assert json.loads((out / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["down_proj", "q_proj"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


@pytest.mark.parametrize(
    ("alpha", "rank"), [(16.0, 6), (16.0, 16), (32.0, 12), (1.0, 3), (0.1, 7), (22.5, 64)]
)
def test_alpha_comes_back_as_the_number_that_was_configured(alpha: float, rank: int) -> None:
    scale = float(np.float32(alpha / rank))
    pairs = {"x": (np.zeros((rank, 2), np.float32), np.zeros((2, rank), np.float32))}
    assert Adapter(base="", scale=scale, pairs=pairs).alpha == alpha


def test_changed_file_and_foreign_files_are_refused(store: PolicyStore, tmp_path: Path) -> None:
    base = base_weights(store)
    adapter = adapter_on(store, base)
    manifest = publish(store, adapter)
    path = store.weights_path(manifest.digest)
    with pytest.raises(PolicyError, match="weights digest"):
        read_adapter(path, digest="0" * 64)
    full_path = store.weights_path(base)
    with pytest.raises(PolicyError, match="its base is missing"):
        read_adapter(full_path, digest=base)


@pytest.mark.parametrize(
    ("dropped", "changed", "match"),
    [
        ("lora_B", None, "is not an adapter: unexpected tensor"),
        (SCALE, None, "its base is missing"),
        (
            "",
            TensorSource(name=BASE, dtype="U8", shape=(3,), data=lambda: b"abc"),
            "is not a digest",
        ),
        (
            "",
            TensorSource(name=SCALE, dtype="I32", shape=(1,), data=lambda: b"abcd"),
            "is not a number",
        ),
        (
            "",
            TensorSource(
                name="base_model.model.model.layers.0.mlp.down_proj.lora_A.weight",
                dtype="BF16",
                shape=(4, 12),
                data=lambda: bytes(96),
            ),
            "it has types BF16 and F32",
        ),
        ("", TensorSource(name="more", dtype="U8", shape=(1,), data=lambda: b"a"), "tensor 'more'"),
    ],
)
def test_file_that_is_not_quite_an_adapter_is_refused(
    store: PolicyStore, tmp_path: Path, dropped: str, changed: TensorSource | None, match: str
) -> None:
    sources = {
        source.name: source for source in adapter_sources(adapter_on(store, base_weights(store)))
    }
    if dropped:
        del sources[next(name for name in sources if dropped in name)]
    if changed is not None:
        sources[changed.name] = changed
    path = tmp_path / "odd.safetensors"
    manifest = write_tensors(path, sources.values())
    with pytest.raises(PolicyError, match=match):
        read_adapter(path, digest=manifest.digest)


def tensors(path: Path) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    with mapped(path) as data:
        return {
            entry.name: np.frombuffer(bytes(data[entry.start : entry.end]), "<f4").reshape(
                entry.shape
            )
            for entry in read_entries(path)
        }

"""Tests that a delta restores exactly its version, or fails."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.core.errors import PolicyError
from dora_pipe.store import delta as deltas
from dora_pipe.store.delta import (
    Change,
    gaps_of,
    opened_deltas,
    positions_of,
    write_delta,
    write_from_deltas,
)
from dora_pipe.store.safetensors_file import DTYPE_BYTES, TensorSource, write_tensors

Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""Type, shape and bytes by name."""


def save(path: Path, tensors: Tensors) -> str:
    sources = [
        TensorSource(name=name, dtype=dtype, shape=shape, data=partial(bytes, data))
        for name, (dtype, shape, data) in tensors.items()
    ]
    return write_tensors(path, sources).digest


def patched(folder: Path, versions: list[Tensors]) -> list[Change]:
    digests = [save(folder / f"v{n}", tensors) for n, tensors in enumerate(versions)]
    return [
        write_delta(
            folder / f"p{n}",
            folder / f"v{n - 1}",
            folder / f"v{n}",
            digest_before=digests[n - 1],
            digest_after=digests[n],
        )
        for n in range(1, len(versions))
    ]


def build_delta(folder: Path, base: int, last: int) -> bytes:
    paths = [folder / f"p{n}" for n in range(base + 1, last + 1)]
    with opened_deltas(paths) as opened:
        write_from_deltas(folder / "made", folder / f"v{base}", opened)
    return (folder / "made").read_bytes()


@given(st.sets(st.integers(0, 5000)))
def test_positions_come_back_and_cost_a_byte_each_and_one_per_255_passed(changed: set[int]) -> None:
    positions = np.array(sorted(changed), np.int64)
    gaps = gaps_of(positions)
    assert positions_of(gaps).tolist() == positions.tolist()
    assert gaps.size <= len(changed) + max(changed, default=0) // 255


DTYPES = ("BF16", "F32", "F64", "I8")


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    before: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    after = {}
    for name in draw(st.sets(st.sampled_from("abcd"), min_size=1)):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        item, size = DTYPE_BYTES[dtype], int(np.prod(shape, dtype=np.int64))
        old = bytes(item * size)
        new = bytearray(old)
        for position in draw(st.sets(st.integers(0, size - 1))) if size else ():
            new[position * item] = draw(st.integers(1, 255))
        outcome = draw(st.sampled_from(("stays", "stays", "comes", "goes", "reshaped")))
        if outcome != "comes":
            before[name] = (dtype, shape, old)
        if outcome != "goes":
            other = (*shape, 1) if outcome == "reshaped" else shape
            after[name] = (dtype, other, bytes(new))
    return before, after


@settings(max_examples=150, deadline=None)
@given(versions=two_versions(), block=st.sampled_from((1, 3, 64)))
def test_the_file_that_a_delta_makes_is_the_version_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, versions: tuple[Tensors, Tensors], block: int
) -> None:
    folder = tmp_path_factory.mktemp("delta")
    with pytest.MonkeyPatch.context() as delta:
        delta.setattr(deltas, "BLOCK_ELEMENTS", block)
        (change,) = patched(folder, list(versions))
        assert build_delta(folder, 0, 1) == (folder / "v1").read_bytes()
    old, new = versions
    differing = sum(
        sum(
            old.get(name, ("", (), b""))[:2] != (dtype, shape)
            or old[name][2][index : index + DTYPE_BYTES[dtype]]
            != data[index : index + DTYPE_BYTES[dtype]]
            for index in range(0, len(data), DTYPE_BYTES[dtype])
        )
        for name, (dtype, shape, data) in new.items()
    )
    assert change.changed == differing


def bf16(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return "BF16", values.shape, (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def walk(versions: int, size: int = 4000, share: float = 0.01) -> list[Tensors]:
    chance = np.random.default_rng(3)
    weights = chance.normal(size=size)
    tensors: list[Tensors] = []
    for _ in range(versions):
        tensors.append({"bias": bf16(np.ones(8)), "weight": bf16(weights)})
        weights = np.where(chance.random(size) < share, chance.normal(size=size), weights)
    return tensors


def test_a_delta_of_one_weight_in_a_hundred_has_less_than_a_twentieth_of_the_bytes(
    tmp_path: Path,
) -> None:
    (change,) = patched(tmp_path, walk(2, size=200_000))
    assert 0.005 < change.share < 0.015
    assert (tmp_path / "p1").stat().st_size < (tmp_path / "v1").stat().st_size / 20


def test_every_damaged_byte_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    patched(tmp_path, walk(2, size=300))
    sound = (tmp_path / "p1").read_bytes()
    for index in range(len(sound)):
        (tmp_path / "p1").write_bytes(
            sound[:index] + bytes([sound[index] ^ 1]) + sound[index + 1 :]
        )
        with pytest.raises(PolicyError, match="not a usable delta"):
            build_delta(tmp_path, 0, 1)
    assert not (tmp_path / "made").exists()


def test_a_delta_of_another_version_is_refused_by_what_comes_out(tmp_path: Path) -> None:
    patched(tmp_path, walk(4))
    with (
        pytest.raises(PolicyError, match="does not make version"),
        opened_deltas([tmp_path / "p3"]) as opened,
    ):
        write_from_deltas(tmp_path / "made", tmp_path / "v0", opened)
    for names, why in ((("p1", "p3"), "does not follow"), (("p9",), "no delta at")):
        paths = [tmp_path / name for name in names]
        with pytest.raises(PolicyError, match=why), opened_deltas(paths):
            pass


def signed(data: bytes, old: bytes, new: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[-40:-32])
    frames, head = data[: -40 - length], data[-40 - length : -40]
    assert old in head
    head = head.replace(old, new)
    body = frames + head + struct.pack("<Q", len(head))
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"BF16", b"X16"),
        (b"[8]", b"[-8]"),
        (b"[8]", b"[9223372036854775808]"),
        (b"[8]", b"[8388608]"),
        (b"[[8,0,0,", b"[[9,0,0,"),
        (b"[[8,0,0,", b"[[8,8,0,"),
        (b"[[8,0,0,", b"[[3,0,0,"),
        (b"[[8,0,0,", b"[[8,0,0,1"),
        (b"[[8,0,0,", b"[[3,900,0,"),
        (b'"bias"', b'"weight"'),
        (b'"gone":[]', b'"gone":["other"]'),
        (b'"before":', b'"befor":'),
    ],
)
def test_a_head_that_cannot_be_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    entry, two = walk(2, size=300)
    patched(tmp_path, [entry, {**two, "bias": bf16(np.full(8, 2.0))}])
    (tmp_path / "p1").write_bytes(signed((tmp_path / "p1").read_bytes(), old, new))
    with pytest.raises(PolicyError, match="not a usable delta"):
        build_delta(tmp_path, 0, 1)


def test_a_delta_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = {"x": bf16(np.ones(4))}, {"x": bf16(np.ones(4)), "y": bf16(np.ones(4096))}
    patched(tmp_path, [small, large])
    monkeypatch.setattr(deltas, "BYTES_FREE", 1000)
    with pytest.raises(PolicyError, match="produces more than"):
        build_delta(tmp_path, 0, 1)


def test_what_is_not_finite_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "v0", {"x": bf16(np.ones(4))})
    data = np.ones(4, "<f4")
    data[1] = np.nan
    with pytest.MonkeyPatch.context() as delta:
        delta.setattr("dora_pipe.store.safetensors_file.refuse_non_finite", lambda *_: None)
        digest = save(tmp_path / "v1", {"x": ("F32", (4,), data.tobytes())})
    write_delta(
        tmp_path / "p1", tmp_path / "v0", tmp_path / "v1", digest_before="a", digest_after=digest
    )
    with pytest.raises(PolicyError, match="NaN or infinite"):
        build_delta(tmp_path, 0, 1)

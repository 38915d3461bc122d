"""Tests of safetensors files: digests and rejections."""

import hashlib
import json
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import weights_digest
from dora_pipe.store import safetensors_file
from dora_pipe.store.safetensors_file import (
    TensorSource,
    manifest_in_memory,
    read_entries,
    read_manifest,
    write_tensors,
)


def source(name: str, values: list[float], shape: tuple[int, ...] | None = None) -> TensorSource:
    data = np.array(values, dtype="<f4").tobytes()
    return TensorSource(name=name, dtype="F32", shape=shape or (len(values),), data=lambda: data)


def raw(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def declared(start: int = 0, end: int = 4, **other: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [start, end], **other}


def test_manifest_describes_every_tensor_with_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "w"
    written = write_tensors(path, [source("b", [1.0, 2.0]), source("a", [3.0, 4.0], (1, 2))])
    manifest = read_manifest(path)
    assert manifest == written
    assert [tensor.name for tensor in manifest.tensors] == ["a", "b"]
    assert manifest.tensors[0].shape == (1, 2)
    assert manifest.tensors[1].sha256 == hashlib.sha256(struct.pack("<2f", 1, 2)).hexdigest()
    assert manifest.bytes == 16
    assert manifest.digest == weights_digest(manifest.tensors)


def test_safetensors_itself_writes_files_with_the_same_digest(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    values = {"x": np.arange(6, dtype="<f4").reshape(2, 3), "y": np.ones(1, dtype="<i8")}
    save_file(values, tmp_path / "theirs")
    ours = write_tensors(
        tmp_path / "ours",
        [
            TensorSource(name="y", dtype="I64", shape=(1,), data=values["y"].tobytes),
            TensorSource(name="x", dtype="F32", shape=(2, 3), data=values["x"].tobytes),
        ],
    )
    assert read_manifest(tmp_path / "theirs").digest == ours.digest
    loaded = load_file(tmp_path / "ours")
    assert loaded.keys() == values.keys()
    assert all(np.array_equal(loaded[name], values[name]) for name in values)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=5),
        max_size=4,
    )
)
def test_what_was_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, list[float]]
) -> None:
    path = tmp_path_factory.mktemp("written") / "w"
    sources = [source(name, values) for name, values in tensors.items()]
    written = write_tensors(path, sources)
    assert read_manifest(path) == written == manifest_in_memory(sources)


GARBAGE = {
    "empty": b"",
    "seven bytes": b"1234567",
    "length beyond the file": struct.pack("<Q", 1000) + b"{}",
    "absurd length": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": struct.pack("<Q", 3) + b"{x}",
    "deep JSON": struct.pack("<Q", 40_000) + b"[" * 40_000,
    "a list": struct.pack("<Q", 2) + b"[]",
    "not UTF-8": struct.pack("<Q", 5) + b'{"\xff"',
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w"
    path.write_bytes(content)
    with pytest.raises(PolicyError, match="not a safetensors file") as caught:
        read_manifest(path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": declared(4, 8)}, bytes(8)),
        ({"a": declared(), "b": declared(2, 6)}, bytes(8)),
        ({"a": declared(), "b": declared(0, 4)}, bytes(4)),
        ({"a": declared()}, bytes(3)),
        ({"a": declared()}, bytes(5)),
        ({"a": declared(shape=[2])}, bytes(4)),
        ({"a": declared(shape=[-1])}, bytes(4)),
        ({"a": declared(dtype="F31")}, bytes(4)),
        ({"a": {"dtype": "F32"}}, bytes(4)),
        ({"a": declared(0, -4)}, bytes(4)),
    ],
)
def test_tensors_that_do_not_fill_the_file_are_refused(
    tmp_path: Path, header: object, data: bytes
) -> None:
    with pytest.raises(PolicyError, match="not a safetensors file"):
        read_entries(raw(tmp_path / "w", header, data))


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 4))
def test_file_hashed_by_several_threads_is_the_same_file(sizes: list[int], threads: int) -> None:
    sources = [source(f"t{index}", [float(index)] * size) for index, size in enumerate(sizes)]
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as delta:
        alone, several = Path(folder) / "alone", Path(folder) / "several"
        expected = write_tensors(alone, sources)
        delta.setattr(safetensors_file, "BESIDE_BYTES", 0)
        delta.setattr(safetensors_file, "HASHERS_MAX", threads)
        delta.setattr("os.sched_getaffinity", lambda _: set(range(8)))
        assert write_tensors(several, sources) == expected
        assert several.read_bytes() == alone.read_bytes()
        assert read_manifest(several) == expected

"""Arrow records that are small and become large, or lie about how large they are; a program too.

``python -m tests.support.arrow_bombs`` makes them all, reads each in a process with a bound on its
address space, and prints a line for each: bytes of the record, how far the process grew at its
highest, refusal. With FILES it reads those: name, refusal (empty if it was read), growth and size
of Arrow's pool, in bytes.
"""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import zstandard

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import arrow_frame
from dora_pipe.schemas.trajectory_codec import TRAJECTORY, decode_trajectory, encode_trajectory
from tests.golden import arrow_values
from tests.support import flatbuffer
from tests.support.flatbuffer import schema_message

RAW: Final = arrow_frame.decompress(encode_trajectory(arrow_values.TRAJECTORY)[0])
"""A sound stream."""

LARGE: Final = 60_000_000
"""Bytes; what a stream may hold at most is a little more."""


def stream_of(batch: pa.RecordBatch, options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
    """A stream with this batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def frame(raw: bytes) -> bytes:
    """A frame around a stream."""
    return zstandard.compress(raw)


def with_columns(**columns: pa.Array) -> bytes:
    """The sound stream with other columns in place of its own, or beside them."""
    batch = pa.ipc.open_stream(RAW).read_next_batch()
    arrays = {name: batch.column(place) for place, name in enumerate(batch.schema.names)}
    arrays.update(columns)
    return stream_of(pa.record_batch(list(arrays.values()), names=list(arrays)))


def under(schema: bytes) -> bytes:
    """The sound batch under another schema."""
    return schema + RAW[len(TRAJECTORY.head) :]


def list_of(inner: pa.Array) -> pa.Array:
    """One list of everything in an array."""
    return pa.ListArray.from_arrays(pa.array([0, len(inner)], pa.int32()), inner)


def structs(count: int, **parts: pa.Array) -> pa.Array:
    """Structs; without parts they are no bytes at all."""
    if not parts:
        return pa.StructArray.from_buffers(pa.struct([]), count, [None])
    return pa.StructArray.from_arrays(list(parts.values()), names=list(parts))


def shared_lists(columns: int, entries: int) -> pa.Array:
    """A struct of many lists that are all the same bytes."""
    one = list_of(pa.array(np.zeros(entries, np.int8)))
    return list_of(structs(1, **{f"x{place}": one for place in range(columns)}))


def lying(at: int, pattern: str, value: int) -> bytes:
    """The sound stream with one number of its messages changed."""
    changed = bytearray(RAW)
    struct.pack_into(pattern, changed, at, value)
    return bytes(changed)


def largest() -> bytes:
    """A record that is read, as large as the bounds let it be."""
    count = arrow_frame.ENTRIES_MAX
    beside = frame(
        with_columns(
            token_ids=list_of(pa.array(np.arange(1000, 1000 + count, dtype=np.int32))),
            logprobs=list_of(pa.array(np.full(count, -0.7, np.float32))),
            sampler_logprobs=list_of(pa.array(np.full(count, -0.9, np.float32))),
            loss_mask=list_of(pa.array(np.ones(count, np.uint8))),
            segments=list_of(
                pa.array(_segments(count), TRAJECTORY.schema.field("segments").type.value_type)
            ),
            meta_json=pa.array([_meta()]),
            unknown=pa.array([b"\x01" * 16_000_000]),
        )
    )
    return beside


def _segments(tokens: int) -> list[dict[str, Any]]:
    count = arrow_frame.ROWS_MAX
    step = tokens // count
    return [
        {
            "kind": "model",
            "start": place * step,
            "end": (place + 1) * step,
            "turn": place,
            "start_ns": 10**18 + place,
            "end_ns": 10**18 + place,
            "worker": f"w{place}",
            "epoch": 1000 + place,
            "version": 3,
            "tool": "",
            "ok": True,
        }
        for place in range(count)
    ]


def _meta() -> str:
    meta = json.loads(pa.ipc.open_stream(RAW).read_next_batch().column("meta_json")[0].as_py())
    meta["prompt_tokens"] = 0
    meta["extra"] = {"x": [{} for _ in range(2_600_000)]}
    return json.dumps(meta, separators=(",", ":"))


_MESSAGE_2 = len(TRAJECTORY.head)
_MIB: Final = 1 << 20
_TEXT: Final = b"z" * 12_000

BOMBS: Final[dict[str, tuple[Callable[[], bytes], str]]] = {
    "a list of empty structs": (
        lambda: frame(with_columns(segments=list_of(structs(2**31 - 1)))),
        "structs in a list are above",
    ),
    "a list of structs of nulls": (
        lambda: frame(with_columns(segments=list_of(structs(0, q=pa.nulls(200_000_000))))),
        "structs in a list are above",
    ),
    "lists in a struct on the same bytes": (
        lambda: frame(with_columns(segments=shared_lists(12, 1_000_000))),
        "entries are above",
    ),
    "a million nulls in a list in a struct": (
        lambda: frame(with_columns(segments=list_of(structs(0, q=list_of(pa.nulls(2**30)))))),
        "entries are above",
    ),
    "fifteen million tokens": (
        lambda: frame(with_columns(token_ids=list_of(pa.array(np.zeros(LARGE // 4, np.int32))))),
        "column of",
    ),
    "sixty million bytes of mask": (
        lambda: frame(with_columns(loss_mask=list_of(pa.array(np.zeros(LARGE, np.uint8))))),
        "column of",
    ),
    "one character that makes the others four bytes": (
        lambda: frame(with_columns(meta_json=pa.array(["x" * LARGE + "\U0001f600"]))),
        "column of",
    ),
    "a hundred thousand columns": (
        lambda: frame(with_columns(**{f"x{n}": pa.array([1]) for n in range(100_000)})),
        "metadata of",
    ),
    "a field named half a million times": (
        lambda: frame(under(schema_message([500_000]))),
        "metadata of",
    ),
    "four times as many fields at each of six levels, with the same long text": (
        lambda: frame(under(schema_message([4] * 6, texts=1, text=_TEXT))),
        "more than 512 fields",
    ),
    "the same long text a thousand times": (
        lambda: frame(under(schema_message([2], texts=500, text=_TEXT))),
        "more than 512 fields",
    ),
    "a hundred levels": (
        lambda: frame(under(schema_message([1] * 100))),
        "deeper than 8",
    ),
    "the other byte order": (
        lambda: frame(under(schema_message([10], endianness=1))),
        "big-endian",
    ),
    "a union": (
        lambda: frame(under(schema_message([1], tag=flatbuffer.UNION))),
        "Arrow's type 14",
    ),
    "a view of texts": (
        lambda: frame(with_columns(x=pa.array(["y"], pa.string_view()))),
        "Arrow's type 24",
    ),
    "a dictionary of a billion": (
        lambda: frame(under(schema_message([1], dictionary=True))),
        "or with a dictionary",
    ),
    "metadata that claims two gigabytes": (
        lambda: frame(lying(_MESSAGE_2 + 4, "<i", 2**31 - 1)),
        "metadata of",
    ),
    "metadata of less than nothing": (
        lambda: frame(lying(_MESSAGE_2 + 4, "<i", -8)),
        "metadata of",
    ),
    "a compressed body": (
        lambda: frame(
            stream_of(
                pa.record_batch({"trajectory": ["x" * LARGE]}),
                pa.ipc.IpcWriteOptions(compression="zstd"),
            )
        ),
        "body is compressed",
    ),
    "a frame of a petabyte": (
        lambda: b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 50) + b"\x01\x00\x00",
        "is above",
    ),
    "a window of two gigabytes": (lambda: _wide_window(), "not a zstd frame"),
    "a frame that goes on": (lambda: _endless(), "goes on above"),
    "the largest record": (largest, ""),
}
"""Name to (bytes, what its refusal says)."""


def _wide_window() -> bytes:
    """A frame without a size, with a window of 2 GiB: descriptor 0, exponent 21."""
    return b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + b"\x01\x00\x00"


def _endless() -> bytes:
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    pieces = [stream.compress(bytes(_MIB)) for _ in range(200)]
    return b"".join([*pieces, stream.flush()])


def _status(name: str) -> int:
    """A line of this process's status, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def main(files: list[str]) -> None:
    """Read every file, each from the same beginning, with a bound on the address space."""
    decode_trajectory(encode_trajectory(arrow_values.TRAJECTORY)[0])
    limit = _status("VmSize") + arrow_frame.DECODE_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for file in files:
        data = Path(file).read_bytes()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # The peak begins again.
        before = _status("VmRSS")
        refused = ""
        try:
            decode_trajectory(data)
        except SchemaError as error:
            refused = error.message
        grown = _status("VmHWM") - before
        pool = pa.default_memory_pool().max_memory()
        sys.stdout.write(f"{Path(file).name}\t{refused}\t{grown}\t{pool}\n")


def table() -> None:
    """Every bomb, as a person reads it."""
    with tempfile.TemporaryDirectory() as folder:
        files = {str(Path(folder) / name): made() for name, (made, _) in BOMBS.items()}
        for path, data in files.items():
            Path(path).write_bytes(data)
        command = [sys.executable, "-m", "tests.support.arrow_bombs", *files]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line, data in zip(lines.splitlines(), files.values(), strict=True):
        name, refused, grown, _ = line.split("\t")
        size = f"{len(data):>9} bytes  {int(grown) / _MIB:6.1f} MiB"
        sys.stdout.write(f"{size}  {name}: {refused or 'read'}\n")


if __name__ == "__main__":
    main(sys.argv[1:]) if len(sys.argv) > 1 else table()

"""Arrow records that expand or misstate their size, and a program that reads them.

``python -m tests.support.arrow_bombs`` reads each in a process with bounded address space, and
prints record bytes, peak growth and refusal. With FILES it prints name, refusal, growth and Arrow's
pool size in bytes.
"""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import zstandard

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import arrow_frame
from dora_pipe.schemas.trajectory_codec import TRAJECTORY, decode_trajectory, encode_trajectory
from tests.golden import arrow_values

INT, STRUCT = 2, 13
"""Arrow's type tags."""

Value = tuple[str, int]
"""Struct format and value."""


class Flat:
    def __init__(self) -> None:
        self.data = bytearray(4)

    def table(self, values: Mapping[int, Value], refs: Sequence[int] = ()) -> Table:
        slots = max([*values, *refs], default=-1) + 1
        self._pad(8)
        at_vtable = len(self.data)
        self.data += bytes(4 + 2 * slots)
        self._pad(8)
        position = len(self.data)
        self.data += struct.pack("<i", position - at_vtable)
        places: dict[int, int] = {}
        for slot in sorted([*values, *refs]):
            pattern, number = values.get(slot, ("<I", 0))
            self._pad(struct.calcsize(pattern))
            places[slot] = len(self.data)
            self.data += struct.pack(pattern, number)
            struct.pack_into("<H", self.data, at_vtable + 4 + 2 * slot, places[slot] - position)
        size = len(self.data) - position
        struct.pack_into("<HH", self.data, at_vtable, 4 + 2 * slots, size)
        return Table(at=position, places=places)

    def vector(self, count: int) -> list[int]:
        self._pad(4)
        self.data += struct.pack("<I", count) + bytes(4 * count)
        return [len(self.data) - 4 * (count - index) for index in range(count)]

    def text(self, text: bytes) -> int:
        self._pad(4)
        position = len(self.data)
        self.data += struct.pack("<I", len(text)) + text + b"\0"
        return position

    def point(self, index: int, target: int) -> None:
        assert target > index
        struct.pack_into("<I", self.data, index, target - index)

    def _pad(self, to: int) -> None:
        self.data += bytes(-len(self.data) % to)


@dataclass(frozen=True, slots=True)
class Table:
    at: int
    places: Mapping[int, int] = field(default_factory=dict)


def schema_message(levels: Sequence[int], name: bytes = b"x") -> bytes:
    """Return a schema in which all fields of a level share the next level's fields as children:
    ``[3, 1]`` is three fields (one table), each with one child."""
    flat = Flat()
    message = flat.table({0: ("<h", 4), 1: ("<B", 1), 3: ("<q", 0)}, [2])
    flat.point(0, message.at)
    schema = flat.table({}, [1])
    flat.point(message.places[2], schema.at)
    holder, slot, named = schema, 1, []
    for depth, count in enumerate(levels):
        last = depth == len(levels) - 1
        places = flat.vector(count)
        flat.point(holder.places[slot], places[0] - 4)
        tag = INT if last else STRUCT
        holder, slot = flat.table({2: ("<B", tag)}, [0, 3, *([] if last else [5])]), 5
        for index in places:
            flat.point(index, holder.at)
        kind = flat.table({0: ("<i", 32), 1: ("<B", 1)} if last else {})
        flat.point(holder.places[3], kind.at)
        named.append(holder.places[0])
    text = flat.text(name)
    for index in named:
        flat.point(index, text)
    return _framed(bytes(flat.data))


def _framed(metadata: bytes) -> bytes:
    padded = metadata + bytes(-len(metadata) % 8)
    return struct.pack("<iI", -1, len(padded)) + padded


RAW: Final = arrow_frame.decompress(encode_trajectory(arrow_values.TRAJECTORY)[0])
"""Valid stream."""

LARGE: Final = 60_000_000
"""Bytes; slightly below the limit of a stream."""


def stream_of(batch: pa.RecordBatch, options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def frame(raw: bytes) -> bytes:
    return zstandard.compress(raw)


def with_columns(**columns: pa.Array) -> bytes:
    batch = pa.ipc.open_stream(RAW).read_next_batch()
    arrays = {name: batch.column(index) for index, name in enumerate(batch.schema.names)}
    arrays.update(columns)
    for schema in (TRAJECTORY.schema, TRAJECTORY.routed.schema):
        if list(arrays) == schema.names:
            return stream_of(pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema))
    return stream_of(pa.record_batch(list(arrays.values()), names=list(arrays)))


def under(schema: bytes) -> bytes:
    return schema + RAW[len(TRAJECTORY.head) :]


def list_of(inner: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(inner)], pa.int32()), inner)


def lying(position: int, pattern: str, value: int) -> bytes:
    changed = bytearray(RAW)
    struct.pack_into(pattern, changed, position, value)
    return bytes(changed)


def largest() -> bytes:
    count = arrow_frame.ENTRIES_MAX
    beside = frame(
        with_columns(
            token_ids=list_of(pa.array(np.arange(1000, 1000 + count, dtype=np.int32))),
            logprobs=list_of(pa.array(np.full(count, -0.7, np.float32))),
            sampler_logprobs=list_of(pa.array(np.full(count, -0.9, np.float32))),
            loss_mask=list_of(pa.array(np.ones(count, np.uint8))),
            segments=segments(arrow_frame.ROWS_MAX, count // arrow_frame.ROWS_MAX),
            meta_json=pa.array([_meta()]),
            routed_experts=routes(count, 127),
        )
    )
    return beside


def routes(tokens: int, layers: int) -> pa.Array:
    sizes = {"experts": 255, "layers": layers, "per_token": 1}
    column = {**sizes, "data": bytes(tokens * layers)}
    return pa.array([column], TRAJECTORY.routed.schema.field("routed_experts").type)


def segments(count: int, step: int) -> pa.Array:
    rows = [
        {
            "kind": "model",
            "start": index * step,
            "end": (index + 1) * step,
            "turn": index,
            "start_ns": 10**18 + index,
            "end_ns": 10**18 + index,
            "worker": f"w{index}",
            "incarnation": 1000 + index,
            "version": 3,
            "tool": "",
            "ok": True,
        }
        for index in range(count)
    ]
    return list_of(pa.array(rows, TRAJECTORY.schema.field("segments").type.value_type))


def _meta() -> str:
    meta = json.loads(pa.ipc.open_stream(RAW).read_next_batch().column("meta_json")[0].as_py())
    meta["prompt_tokens"] = 0
    meta["extra"] = {"x": [{} for _ in range(2_600_000)]}
    return json.dumps(meta, separators=(",", ":"))


_MESSAGE_2 = len(TRAJECTORY.head)
_MIB: Final = 1 << 20

BOMBS: Final[dict[str, tuple[Callable[[], bytes], str]]] = {
    "seventy thousand segments": (
        lambda: frame(with_columns(segments=segments(70_000, 0))),
        "entries are above",
    ),
    "two million tokens": (
        lambda: frame(with_columns(token_ids=list_of(pa.array(np.zeros(2_000_000, np.int32))))),
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
    "sixty million bytes of mask beside experts": (
        lambda: frame(
            with_columns(
                loss_mask=list_of(pa.array(np.zeros(LARGE, np.uint8))), routed_experts=routes(1, 1)
            )
        ),
        "column of",
    ),
    "experts above their bound": (
        lambda: frame(with_columns(routed_experts=routes(1 << 20, 140))),
        "column of",
    ),
    "a token through a hundred million layers": (
        lambda: frame(with_columns(routed_experts=routes(1, 100_000_000))),
        "no sizes of a mixture",
    ),
    "as many bytes as experts may have, without them": (
        lambda: frame(RAW + bytes(100_000_000)),
        "record of",
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
    "four times as many fields at each of six levels, with the same long name": (
        lambda: frame(under(schema_message([4] * 6, b"z" * 2_000))),
        "columns are not those",
    ),
    "thirty thousand fields in four kilobytes, with the same long name": (
        lambda: frame(under(schema_message([14] * 4, b"z" * 2_500))),
        "columns are not those|not an Arrow stream",
    ),
    "forty levels": (lambda: frame(under(schema_message([1] * 40))), "columns are not those"),
    "a view of texts": (
        lambda: frame(with_columns(x=pa.array(["y"], pa.string_view()))),
        "columns are not those",
    ),
    "a dictionary": (
        lambda: frame(with_columns(x=pa.array(["y"]).dictionary_encode())),
        "columns are not those",
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
                pa.ipc.open_stream(with_columns(meta_json=pa.array(["x" * LARGE])))
                .read_all()
                .to_batches()[0],
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
"""(bytes, expected refusal) by name."""


def _wide_window() -> bytes:
    return b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + b"\x01\x00\x00"


def _endless() -> bytes:
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    pieces = [stream.compress(bytes(_MIB)) for _ in range(200)]
    return b"".join([*pieces, stream.flush()])


def _status(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def main(files: list[str]) -> None:
    decode_trajectory(encode_trajectory(arrow_values.TRAJECTORY)[0])
    limit = _status("VmSize") + arrow_frame.DECODE_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for file in files:
        data = Path(file).read_bytes()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Reset the peak.
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
    with tempfile.TemporaryDirectory() as folder:
        files = {str(Path(folder) / name): created() for name, (created, _) in BOMBS.items()}
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

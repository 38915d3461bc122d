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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import zstandard

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import arrow_frame
from dora_pipe.schemas.trajectory_codec import TRAJECTORY, decode_trajectory, encode_trajectory
from tests.golden import arrow_values

INT, UTF8, LIST, STRUCT, UNION, UTF8_VIEW = 2, 5, 12, 13, 14, 24
"""Tags of Arrow's types."""

Value = tuple[str, int]
"""A number in a table: its struct format and what it is."""


class Flat:
    """A flatbuffer in the making. Example: ``Flat().root()``."""

    def __init__(self) -> None:
        self.data = bytearray(4)

    def table(self, values: Mapping[int, Value], refs: Sequence[int] = ()) -> Table:
        """A table with numbers and places for offsets, by slot."""
        slots = max([*values, *refs], default=-1) + 1
        self._pad(8)
        at_vtable = len(self.data)
        self.data += bytes(4 + 2 * slots)
        self._pad(8)
        at = len(self.data)
        self.data += struct.pack("<i", at - at_vtable)
        places: dict[int, int] = {}
        for slot in sorted([*values, *refs]):
            pattern, number = values.get(slot, ("<I", 0))
            self._pad(struct.calcsize(pattern))
            places[slot] = len(self.data)
            self.data += struct.pack(pattern, number)
            struct.pack_into("<H", self.data, at_vtable + 4 + 2 * slot, places[slot] - at)
        size = len(self.data) - at
        struct.pack_into("<HH", self.data, at_vtable, 4 + 2 * slots, size)
        return Table(at=at, places=places)

    def vector(self, count: int) -> list[int]:
        """A vector of offsets: their places."""
        self._pad(4)
        self.data += struct.pack("<I", count) + bytes(4 * count)
        return [len(self.data) - 4 * (count - index) for index in range(count)]

    def text(self, text: bytes) -> int:
        """A text: where it lies."""
        self._pad(4)
        at = len(self.data)
        self.data += struct.pack("<I", len(text)) + text + b"\0"
        return at

    def point(self, place: int, target: int) -> None:
        """Let the offset at a place lead to a target behind it."""
        assert target > place
        struct.pack_into("<I", self.data, place, target - place)

    def _pad(self, to: int) -> None:
        self.data += bytes(-len(self.data) % to)


@dataclass(frozen=True, slots=True)
class Table:
    """Where a table lies, and its offsets by slot."""

    at: int
    places: Mapping[int, int] = field(default_factory=dict)


def schema_message(
    levels: Sequence[int],
    *,
    tag: int = INT,
    endianness: int = 0,
    texts: int = 0,
    text: bytes = b"",
    dictionary: bool = False,
) -> bytes:
    """A schema whose fields of each level all have the same children: those of the next level.

    ``levels == [3, 1]`` are three fields (one table), each with one child. The last are of type
    `tag`, with `texts` texts that are all one pair; those above are structs.
    """
    flat = Flat()
    message = flat.table({0: ("<h", 4), 1: ("<B", 1), 3: ("<q", 0)}, [2])
    flat.point(0, message.at)
    schema = flat.table({0: ("<h", endianness)}, [1])
    flat.point(message.places[2], schema.at)
    holder, slot = schema, 1
    for depth, count in enumerate(levels):
        last = depth == len(levels) - 1
        places = flat.vector(count)
        flat.point(holder.places[slot], places[0] - 4)
        refs = [
            0,
            3,
            *([] if last else [5]),
            *([6] if last and texts else []),
            *([4] if dictionary else []),
        ]
        holder, slot = flat.table({1: ("<B", 1), 2: ("<B", tag if last else STRUCT)}, refs), 5
        for place in places:
            flat.point(place, holder.at)
        _leaf(flat, holder, tag if last else STRUCT, texts, text)
    return _framed(bytes(flat.data))


def _leaf(flat: Flat, holder: Table, tag: int, texts: int, text: bytes) -> None:
    """Name, type, texts and dictionary of a field."""
    flat.point(holder.places[0], flat.text(b"x"))
    kind = flat.table({0: ("<i", 32), 1: ("<B", 1)} if tag == INT else {})
    flat.point(holder.places[3], kind.at)
    if 4 in holder.places:
        flat.point(holder.places[4], flat.table({0: ("<q", 1)}).at)
    if 6 in holder.places:
        places = flat.vector(texts)
        flat.point(holder.places[6], places[0] - 4)
        pair = flat.table({}, [0, 1])
        for place in places:
            flat.point(place, pair.at)
        both = flat.text(text)
        for place in pair.places.values():
            flat.point(place, both)


def _framed(metadata: bytes) -> bytes:
    padded = metadata + bytes(-len(metadata) % 8)
    return struct.pack("<iI", -1, len(padded)) + padded


RAW: Final = arrow_frame.decompress(encode_trajectory(arrow_values.TRAJECTORY)[0])
"""A sound stream."""

LARGE: Final = 60_000_000
"""Bytes; what a stream may hold at most is a little more."""


def stream_of(batch: pa.RecordBatch, options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
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
            routed_experts=routes(count, 127),
        )
    )
    return beside


def routes(tokens: int, layers: int) -> pa.Array:
    """Through the same expert, one of 255, in every layer."""
    sizes = {"experts": 255, "layers": layers, "per_token": 1}
    column = {**sizes, "data": bytes(tokens * layers)}
    return pa.array([column], TRAJECTORY.routed.schema.field("routed_experts").type)


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
        lambda: frame(under(schema_message([1], tag=UNION))),
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

"""Decides what is fuzzed: every reader of bytes that others wrote, as a function of one input.

A target refuses an input with an error of ours, of one line, or it accepts it; then what it has
read can be written, and read again as the same. Anything else (another exception, a crash, a hang,
more memory than `MEMORY_BYTES_MAX`) is a finding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from dora_pipe.config.describe import dump_toml
from dora_pipe.config.load import load_config
from dora_pipe.core.errors import (
    MESSAGE_CHARACTERS_MAX,
    DoraError,
    PolicyError,
    SchemaError,
)
from dora_pipe.schemas.control import decode_control
from dora_pipe.schemas.dead_letter import HEADER, decode_dead_letter, encode_dead_letter
from dora_pipe.schemas.headers import header_pairs, parse_headers
from dora_pipe.schemas.metrics import decode_metrics
from dora_pipe.schemas.policy import Manifest as Policy
from dora_pipe.schemas.rounds import decode_round
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import (
    decode_any_progress,
    decode_trajectory,
    encode_any_progress,
    encode_trajectory,
    view_trajectory,
)
from dora_pipe.schemas.wire import Unknown, decode, encode
from dora_pipe.store.delta import opened_deltas, write_delta, write_from_deltas
from dora_pipe.store.safetensors_file import TensorSource, read_manifest, write_tensors
from tests.golden import make

ROOT: Final = Path(__file__).resolve().parents[2]
CORPUS: Final = Path(__file__).parent / "corpus"
MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024
"""Of the process that fuzzes, interpreter and libraries (150 MiB) included."""

LETTER_BYTES_MAX: Final = 64 * 1024 * 1024

Shape = Literal["json", "frame", "lines", "delta", "safetensors"]
"""How mutations keep an input close to what is sound (see `mutations`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    name: str
    read: Callable[[bytes], object]
    """What an input says, after it was written and read again. Raises DoraError."""
    shape: Shape
    seeds: Callable[[], list[bytes]]
    """Sound inputs: golden bytes."""


def check(target: Target, data: bytes) -> DoraError | None:
    try:
        target.read(data)
    except DoraError as error:
        assert error.message, "an error without a message"
        assert error.message.isprintable(), "an error of several lines, or none for a terminal"
        assert len(error.message) <= 6 * MESSAGE_CHARACTERS_MAX, "an error without an end"
        return error
    return None


def _again(read: Callable[[bytes], Any], write: Callable[[Any], bytes]) -> Callable[[bytes], Any]:
    def whole(data: bytes) -> Any:
        value = read(data)
        try:
            written = write(value)
            again = read(written)
        except DoraError as error:
            raise AssertionError(f"was read and cannot be written: {error}") from error
        assert again == value, "comes back as another value"
        return value

    return whole


def _write_record(record: Any) -> bytes:
    return record.raw if isinstance(record, Unknown) else encode(record)


def _read_headers(data: bytes) -> Any:
    return parse_headers([(name.decode("latin-1"), value) for name, value in _split(data)])


def _split(data: bytes) -> list[tuple[bytes, bytes]]:
    lines = (line.partition(b": ") for line in data.split(b"\n") if line)
    return [(name, value) for name, _, value in lines]


def _read_letter(data: bytes) -> Any:
    header, _, value = data.partition(b"\n")
    return decode_dead_letter(value, [(HEADER, header)])


def _write_letter(letter: Any) -> bytes:
    value, ((_, header),) = encode_dead_letter(letter, max_record_bytes=LETTER_BYTES_MAX)
    return header + b"\n" + value


@cache
def _scratch() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="dora-pipe-fuzz-")
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: Final[list[tempfile.TemporaryDirectory[str]]] = []


def _read_config(data: bytes) -> Any:
    path = _scratch() / "dora.toml"
    path.write_bytes(data)
    return load_config(path, [])


def _read_policy(data: bytes) -> Any:
    path = _scratch() / "policy.safetensors"
    path.write_bytes(data)
    return read_manifest(path)


_MANIFEST = msgspec.json.Decoder(Policy)


def _read_policy_whole(data: bytes) -> Any:
    manifest = _read_policy(data)
    assert decode(encode(manifest), _MANIFEST) == manifest
    return manifest


def _golden(*names: str) -> list[bytes]:
    files = make.files()
    return [data for path, data in sorted(files.items()) if path.startswith(names)]


def _weights(name: str, *values: int) -> Path:
    path = _scratch() / name
    first = TensorSource(name="a", dtype="BF16", shape=(6,), data=lambda: bytes(12))
    other = TensorSource(name="b", dtype="I8", shape=(2, 4), data=lambda: bytes(values))
    write_tensors(path, [first, other])
    return path


def _read_delta(data: bytes) -> Any:
    path = _scratch() / "fuzzed.delta"
    path.write_bytes(data)
    with opened_deltas([path]) as deltas:
        try:
            write_from_deltas(_scratch() / "patched", _weights("base", *bytes(8)), deltas)
        except PolicyError as error:
            if "does not make version" not in error.message:
                raise
        return deltas[0].after


def _deltas() -> list[bytes]:
    results = []
    for values in ((0, 0, 0, 9, 0, 0, 0, 0), (1, 2, 3, 4, 5, 6, 7, 8), (0,) * 8):
        after, path = _weights("after", *values), _scratch() / "seed.delta"
        write_delta(
            path,
            _weights("base", *bytes(8)),
            after,
            digest_before="0" * 64,
            digest_after=read_manifest(after).digest,
        )
        results.append(path.read_bytes())
    return results


def _policies() -> list[bytes]:
    header = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":'
    header += b'[0,24]},"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}'
    return [len(header).to_bytes(8, "little") + header + bytes(range(26))]


def _configs() -> list[bytes]:
    datas = [path.read_bytes() for path in sorted((ROOT / "examples").glob("**/*.toml"))]
    datas += [path.read_bytes() for path in sorted((ROOT / "launch" / "templates").glob("*.toml"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.toml"
        path.write_text('[run]\nname="a"\nsteps=3\n[model]\npath="m"\n[task]\nkind="chars"\n')
        datas.append(dump_toml(load_config(path, [])).encode())
    return datas


def _dead_letters() -> list[bytes]:
    files = make.files()
    header = dict(make.pairs_from_bytes(files["dead-letters/headers.txt"]))[HEADER]
    return [header + b"\n" + files["dead-letters/value.bin"]]


def _glance(data: bytes) -> Any:
    refused: SchemaError | None = None
    trajectory: Trajectory | None = None
    try:
        trajectory = decode_trajectory(data)
    except SchemaError as error:
        refused = error
    try:
        observed_trajectory = view_trajectory(data)
    except SchemaError as error:
        assert refused is not None, f"one reader refuses what the other reads: {error}"
    else:
        assert trajectory is not None, f"one reader reads what the other refuses: {refused}"
        assert _said(observed_trajectory) == _said(trajectory)
        assert _plain(observed_trajectory) == _plain(trajectory)
    if refused is not None:
        raise refused
    return trajectory


def _plain(trajectory: Trajectory) -> tuple[Any, ...]:
    return tuple(tuple(int(entry) for entry in entries) for entries in _integers(trajectory))


def _said(trajectory: Trajectory) -> tuple[Any, ...]:
    beside = (
        trajectory.trajectory,
        trajectory.version,
        trajectory.digest,
        trajectory.reward,
        trajectory.meta,
    )
    return *beside, trajectory.length, trajectory.sampled, tuple(trajectory.segments)


def _integers(trajectory: Trajectory) -> tuple[Sequence[int], Sequence[int]]:
    return trajectory.token_ids, trajectory.loss_mask


_ALL: Final = (
    Target(
        name="control",
        read=_again(decode_control, _write_record),
        shape="json",
        seeds=lambda: _golden("control/"),
    ),
    Target(
        name="decisions",
        read=_again(decode_round, encode),
        shape="json",
        seeds=lambda: _golden("decisions/"),
    ),
    Target(
        name="metrics",
        read=_again(decode_metrics, _write_record),
        shape="json",
        seeds=lambda: _golden("metrics/"),
    ),
    Target(
        name="trajectory",
        read=_again(decode_trajectory, lambda value: encode_trajectory(value)[0]),
        shape="frame",
        seeds=lambda: [one for one in _golden("trajectories/") if one[:4] == b"\x28\xb5\x2f\xfd"],
    ),
    Target(
        name="glance",
        read=_glance,
        shape="frame",
        seeds=lambda: [one for one in _golden("trajectories/") if one[:4] == b"\x28\xb5\x2f\xfd"],
    ),
    Target(
        name="progress",
        read=_again(decode_any_progress, encode_any_progress),
        shape="frame",
        seeds=lambda: _golden("progress/progress"),
    ),
    Target(
        name="turn-progress",
        read=_again(decode_any_progress, encode_any_progress),
        shape="frame",
        seeds=lambda: _golden("progress/turn"),
    ),
    Target(
        name="headers",
        read=_again(_read_headers, lambda value: make.pairs_to_bytes(header_pairs(value))),
        shape="lines",
        seeds=lambda: _golden("trajectories/headers.txt"),
    ),
    Target(
        name="dead-letter",
        read=_again(_read_letter, _write_letter),
        shape="json",
        seeds=_dead_letters,
    ),
    Target(name="config", read=_read_config, shape="lines", seeds=_configs),
    Target(name="delta", read=_read_delta, shape="delta", seeds=_deltas),
    Target(name="policy", read=_read_policy_whole, shape="safetensors", seeds=_policies),
)

TARGETS: Final = {one.name: one for one in _ALL}
"""By name."""

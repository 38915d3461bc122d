"""Identity and digests: seeds, prompts, chain, batches, weights, configuration."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from log import Json, Record


def sha256(data: bytes | memoryview) -> str:
    """Return lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def of_value(named: str | None, value: bytes) -> str:
    """Return a value's digest in the form of `named`."""
    if named is None or not named.startswith("blake3-"):
        return sha256(value)
    from blake3 import blake3

    return "blake3-" + blake3(value).hexdigest()


def derive(*parts: int | str) -> int:
    """Derive a seed of 63 bits."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def before(tokens: list[int], contexts: Sequence[Json], position: int) -> list[int]:
    """Return the tokens before an offset, within its context."""
    for context in reversed(contexts):
        if context["start"] <= position:
            shared = _first(tokens, contexts, context.get("parent", -1), context.get("shared", 0))
            return shared + tokens[context["start"] : position]
    return tokens[:position]


def _first(tokens: list[int], contexts: Sequence[Json], number: int, count: int) -> list[int]:
    """Return a context's first tokens; contexts count from 0."""
    if not count:
        return []
    starts = [0, *(context["start"] for context in contexts), len(tokens)]
    ids: list[int] = []
    if number:
        context = contexts[number - 1]
        ids = _first(tokens, contexts, context.get("parent", -1), context.get("shared", 0))
    return (ids + tokens[starts[number] : starts[number + 1]])[:count]


def prompt_of(seed: int, ordinal: int, rows: int) -> tuple[int, int]:
    """Return (data epoch, row) of a training group."""
    epoch, index = divmod(ordinal, rows)
    key = derive("order", seed, epoch)
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            left, right = right, left ^ (derive(key, turn, right) & mask)
        index = left << half | right
        if index < rows:
            return epoch, index


def chain_of(before: str, control: Sequence[Record], value: bytes) -> str:
    """Return the chain after a round."""
    head, _, tail = value.rpartition(b',"chain":"')
    digest = hashlib.sha256(bytes.fromhex(before))
    for record in control:
        digest.update(
            record.offset.to_bytes(8, "big") + len(record.value).to_bytes(8, "big") + record.value
        )
    digest.update(head + tail[65:])
    return digest.hexdigest()


def batch_digest(groups: list[Json]) -> str:
    lines = ["dora-pipe batch 1"]
    for group in sorted(groups, key=lambda group: str(group["group"])):
        lines.append(f"{group['group']}\t{group['version']}\t{group['deadline']}")
        lines += [
            "\t".join(map(str, trajectory[:6])) for trajectory in sorted(group["trajectories"])
        ]
        lines += [
            f"{name}\t{reward!r}" for name, reward in sorted(group.get("rewards", {}).items())
        ]
    return sha256("".join(f"{line}\n" for line in lines).encode())


def weights_digest(tensors: list[list[Any]]) -> str:
    """Digest (name, dtype, shape, sha256) of tensors."""
    lines = (
        f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{digest}\n"
        for name, dtype, shape, digest, *_ in sorted(tensors)
    )
    return sha256("".join(lines).encode())


def config_digest(started: bytes) -> str:
    """Digest the bytes of `config`."""
    text = started.decode()
    start = text.index('"config":') + len('"config":')
    _, end = json.JSONDecoder().raw_decode(text, start)
    return sha256(text[start:end].encode())


def tensors_of(path: Path) -> tuple[list[list[Any]], int]:
    """Return (name, dtype, shape, sha256) of each tensor of a safetensors file, and their bytes."""
    data = memoryview(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(bytes(data[8 : 8 + length]))
    header.pop("__metadata__", None)
    tensors = []
    for name, tensor in header.items():
        start, end = tensor["data_offsets"]
        part = data[8 + length + start : 8 + length + end]
        tensors.append([name, tensor["dtype"], tensor["shape"], sha256(part)])
    return sorted(tensors), len(data) - 8 - length

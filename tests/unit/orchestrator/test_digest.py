"""Tests that the state digest follows its documented formula."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.orchestrator.digest import TABLES, digest_of
from dora_pipe.schemas.wire import canonical
from tests.golden.state import FOLDER, content, golden_state


def by_a_stranger(leaves: Sequence[bytes], rest: bytes) -> str:
    """Compute the documented formula with the standard library."""
    buckets: list[list[bytes]] = [[] for _ in range(4096)]
    for leaf in leaves:
        _, name, _ = json.loads(leaf)
        buckets[crc32(name.encode()) % 4096].append(sha256(leaf).digest())
    whole = sha256(rest).digest()
    for bucket in buckets:
        whole += sha256(b"".join(sorted(bucket))).digest()
    return sha256(whole).hexdigest()


def written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{written(k)}:{written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, float) and "e" in repr(value):
        digits, exponent = repr(value).split("e")
        if -5 <= int(exponent) < 0:
            return "0." + "0" * (-int(exponent) - 1) + digits.replace(".", "")
        return f"{digits}e{int(exponent)}"
    return json.dumps(value, ensure_ascii=False)


def test_formula_is_the_documented_one() -> None:
    state = golden_state()
    made = content(state)
    leaves = made["leaves.jsonl"].splitlines()
    assert len(leaves) == sum(len(getattr(state, table)) for table in TABLES.values()) > 10
    assert {json.loads(one)[0] for one in leaves} == set(TABLES) - {"row"}
    assert by_a_stranger(leaves, made["rest.json"]) == state.digest() == digest_of(state)


def test_example_of_the_documentation_has_its_digest() -> None:
    read = {name: (FOLDER / name).read_bytes() for name in content(golden_state())}
    leaves = read["leaves.jsonl"].splitlines()
    assert by_a_stranger(leaves, read["rest.json"]) == read["digest.txt"].decode().strip()
    for line in (*leaves, read["rest.json"]):
        assert written(json.loads(line)).encode() == line


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0))
def test_numbers_are_written_as_documented(value: float) -> None:
    assert canonical(value).decode() == written(value)

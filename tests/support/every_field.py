"""Changes of single fields of a JSON record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

Path = tuple[str | int, ...]
"""Names and list indexes from the record to a field."""

LEFT_OUT: Final[dict[str, dict[str, Any]]] = {
    "run-started": {"lineage": {"run": "another", "step": 3, "digest": "a" * 64}},
    "worker-joined": {"max_resident_versions": 2},
    "worker-left": {"progress": {"g0000000001-000": [1, 0, 0]}},
    "step-committed": {
        "checkpoint": {"sha256": "a" * 64, "bytes": 8},
        "adopted": True,
        "dropped": [1],
        "early_s": [0.5],
        "overlap_s": 0.5,
    },
    "command": {"args": {"anything": 1}},
    "take-batch": {"pins": [0]},
    "assign": {"drop": [0]},
}
"""Optional fields by kind, with a forged value."""


def fields_of(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield each field with a plain value; the first entry represents a list."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from fields_of(inner, (*path, name))
    elif isinstance(value, list):
        if value:
            yield from fields_of(value[0], (*path, 0))
    else:
        yield path


def with_another(value: Any, path: Path) -> Any:
    if not path:
        return another(value)
    position = path[0]
    if isinstance(value, list):
        assert isinstance(position, int)
        return [*value[:position], with_another(value[position], path[1:]), *value[position + 1 :]]
    if position not in value:
        return {**value, position: LEFT_OUT[value["kind"]][str(position)]}
    return {**value, position: with_another(value[position], path[1:])}


def another(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * 1.5 + 0.25
        case None:
            return 0.5
        case str() if len(value) == 64:
            return value[:-1] + ("1" if value[-1] == "0" else "0")
        case _:
            return f"{value}x"

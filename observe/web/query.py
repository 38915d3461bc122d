"""What a page asks for, as it stands in an address; it decides what is too long or no number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from dora_pipe.core.errors import UsageError

TEXT_MAX = 200
"""Characters of one value."""

FIELDS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Example: ``parse_query("/api/0/trajectories?worker=w1&limit=50")``."""

    path: tuple[str, ...]
    fields: Mapping[str, str]

    def text(self, name: str) -> str:
        """A value; empty without one. Raises UsageError for one that is too long."""
        value = self.fields.get(name, "").strip()
        if len(value) > TEXT_MAX:
            raise UsageError(f"{name} has {len(value)} characters, at most {TEXT_MAX} are read")
        return value

    def whole(self, name: str, default: int = 0) -> int:
        """A whole number. Raises UsageError."""
        found = self.text(name)
        if not found:
            return default
        try:
            return int(found)
        except ValueError:
            raise UsageError(f"{name}={found} is no whole number") from None

    def number(self, name: str) -> float | None:
        """A number; None without one. Raises UsageError."""
        found = self.text(name)
        try:
            return float(found) if found else None
        except ValueError:
            raise UsageError(f"{name}={found} is no number") from None


def parse_query(address: str) -> Query:
    """A path with its fields. Raises UsageError for one that has too many."""
    parts = urlsplit(address)
    path = tuple(unquote(one) for one in parts.path.split("/") if one)
    try:
        fields = dict(parse_qsl(parts.query, max_num_fields=FIELDS_MAX))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Query(path=path, fields=fields)

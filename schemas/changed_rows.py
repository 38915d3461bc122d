"""What of borrowed trajectories counts otherwise than their log says; the file that says so."""

from __future__ import annotations

import msgspec

from dora_pipe.core.errors import SchemaError


class ChangedRows(msgspec.Struct, frozen=True, kw_only=True):
    """The file of `Retrained.change`.

    Example: ``{"rewards": {}, "weights": {}, "without": ["g0000000042"]}``
    """

    without: list[str] = []
    """Groups and trajectories that do not count, sorted."""
    rewards: dict[str, float] = {}
    """By trajectory, in place of those of the log."""
    weights: dict[str, float] = {}
    """Factors of the loss, by trajectory."""


def decode_changed_rows(value: bytes) -> ChangedRows:
    """What such a file says. Raises SchemaError."""
    try:
        return msgspec.json.decode(value, type=ChangedRows)
    except msgspec.DecodeError as error:
        raise SchemaError(f"this is no change of batches: {error}") from None

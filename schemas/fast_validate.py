"""Looks at a trajectory record without Arrow where it lies as this version writes it.

What is read of the stream is exactly what `view_trajectory` reads of it, and everything that is
checked there is checked here; whatever looks unusual (another schema, a null where none is written,
an offset that does not fit) goes to `view_trajectory`, which decides and says why. A test changes
records byte by byte and holds the two against each other.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Final

import zstandard

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.arrow_frame import RAW_BYTES_MAX, WINDOW_BYTES_MAX
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import TRAJECTORY, view_trajectory
from dora_pipe.schemas.trajectory_numbers import Unusual, metadata
from dora_pipe.schemas.trajectory_row import Glance, Row, Sampled

__all__ = ["FastValidator", "Glance", "Sampled"]


class FastValidator:
    """Reads many records, in one thread. Example: ``FastValidator().look(value).sampled``."""

    def __init__(self) -> None:
        self._decompress = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).decompress
        self._frame = metadata()
        self._texts: dict[tuple[bytes, bytes], tuple[str, ...]] = {}

    def look(self, value: bytes) -> Glance:
        """What a record says. Raises SchemaError with a path, nothing else."""
        try:
            return self._row(value).glance()
        except _GIVES_UP:
            return _glance_of(view_trajectory(value))

    def glance(self, value: bytes) -> Trajectory:
        """As `view_trajectory`, but log-probs, which are checked, are left empty.

        Raises SchemaError with a path, nothing else.
        """
        try:
            return self._row(value).trajectory()
        except _GIVES_UP:
            return replace(view_trajectory(value), logprobs=(), sampler_logprobs=())

    def _row(self, value: bytes) -> Row:
        size = zstandard.frame_content_size(value)
        if not 0 <= size <= RAW_BYTES_MAX:
            raise Unusual
        raw = self._decompress(value, allow_extra_data=False)
        if not raw.startswith(TRAJECTORY.head):
            raise Unusual
        return Row(raw, self._frame, self._texts)


_GIVES_UP: Final = (
    Unusual,
    SchemaError,
    zstandard.ZstdError,
    struct.error,
    ValueError,
    MemoryError,
)


def _glance_of(found: Trajectory) -> Glance:
    return Glance(
        found.trajectory,
        found.version,
        found.digest,
        found.reward,
        len(found.token_ids),
        found.sampled,
        tuple(
            Sampled(one.start, one.end, one.worker, one.epoch, one.version)
            for one in found.segments
            if one.kind == "model"
        ),
        found.meta,
    )

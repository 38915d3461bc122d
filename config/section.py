"""Base of the sections, and types of numbers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dora_pipe.schemas.topics import PATTERN
from dora_pipe.schemas.wire import RECORD_BYTES_MAX

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Threads = Annotated[int, Meta(ge=1, le=4096)]
GROUP_SIZE_MAX = 1000
"""Sample numbers have three digits."""

GroupSize = Annotated[int, Meta(ge=1, le=GROUP_SIZE_MAX)]
GroupRedundancy = Annotated[int, Meta(ge=0, le=GROUP_SIZE_MAX - 1)]
FULL_EVERY_MAX = 64
"""A version is made of fewer deltas than this."""

FullEvery = Annotated[int, Meta(ge=1, le=FULL_EVERY_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
RunName = Annotated[str, Meta(pattern=PATTERN)]
PortNumber = Annotated[int, Meta(ge=0, le=65535)]
ComputeDtype = Literal["float32", "bfloat16"]
OptimizerName = Literal["adamw", "muon", "adamw8bit"]
RecordBytes = Annotated[int, Meta(ge=64 * 1024, le=RECORD_BYTES_MAX)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: an unknown key is an error."""

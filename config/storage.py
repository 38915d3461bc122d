"""Sections about what a run keeps beside its log: versions, checkpoints, and where they lie. See
`model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from dora_pipe.config.section import NonNegative, PositiveFloat, Section, WholeEvery
from dora_pipe.schemas.policy import Manifest, PolicyDtype

if TYPE_CHECKING:
    from dora_pipe.config.model import Config
    from dora_pipe.schemas.control import RunStarted

PATCHES: Final = 8
"""`policies.whole_every = "auto"` where a patch is a few hundredths of the whole."""

PATCHED_SHARE: Final = 0.03
"""Share of bfloat16 weights that a step changes at a learning rate of 1e-6 (docs/storage.md)."""

PATCH_BYTES: Final = 2.4
"""Bytes of a patch for each changed weight."""

KEPT_ALL_BYTES: Final = 2**30
"""`store.keep_every = "auto"` keeps everything where a step adds less than this to the store: a
thousand of them lie on one disk."""

KEPT_CHECKPOINTS: Final = 10
"""`store.keep_every = "auto"` of larger ones: what is deleted is at most a hundred steps behind a
checkpoint, with the `trainer.checkpoint_every` that is the default."""


class Policies(Section, frozen=True, kw_only=True):
    """What the versions of the policy are (docs/training.md), and how they are stored."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights, or the adapter, that are published, sampled with and digested; `auto`:
    bfloat16 where the model's config says so and the trainer can. What the optimizer updates is
    float32."""
    whole_every: WholeEvery | Literal["auto"] = "auto"
    """Every so many versions one is stored whole, and so is one with a checkpoint; of the others
    only what has changed is, as a patch (docs/storage.md). 1: all are whole, without patches; auto:
    8 where all weights are published in bfloat16, and 1 where patches would save nothing, as of
    float32 and of adapters."""


class Store(Section, frozen=True, kw_only=True):
    """Policies and checkpoints."""

    path: str = ""
    """Policies and checkpoints; empty is `policies` in the run directory."""
    url: str = ""
    """Where they lie instead: `s3://bucket/prefix?endpoint_override=...`, `file:///shared/run` or
    another file system of pyarrow. `path` then holds copies. See docs/storage.md."""
    cache_gb: PositiveFloat = 100.0
    """Copies in `path` of a store with a `url`, or of versions that patches made, take so much
    room."""
    keep_every: NonNegative | Literal["auto"] = "auto"
    """Keep every so many checkpoints for ever, beside what is pinned, and delete other versions;
    replay makes them again. 0 keeps everything; auto: what the run began with, which is 10 where
    versions and checkpoints add a GiB or more per step, and 0 below that."""


def whole_every(config: Config, dtype: PolicyDtype) -> int:
    """`policies.whole_every` of a run that publishes in this type, as a number."""
    asked = config.policies.whole_every
    if asked != "auto":
        return asked
    small = dtype == "bfloat16" and not config.lora.rank
    return PATCHES if small else 1


def keep_every(config: Config, dtype: PolicyDtype, whole_bytes: int) -> int:
    """`store.keep_every` of a new run whose versions have this type and so many bytes."""
    asked = config.store.keep_every
    if asked != "auto":
        return asked
    return 0 if bytes_per_step(config, dtype, whole_bytes) < KEPT_ALL_BYTES else KEPT_CHECKPOINTS


def bytes_per_step(config: Config, dtype: PolicyDtype, whole_bytes: int) -> int:
    """Average bytes per step in a store that keeps everything: a version, whole or a patch,
    and its share of a checkpoint of AdamW."""
    every, checkpoint_every = whole_every(config, dtype), config.trainer.checkpoint_every
    narrow = dtype == "bfloat16"
    parameters = whole_bytes // (2 if narrow else 4)
    patch = PATCHED_SHARE * PATCH_BYTES * parameters if narrow else whole_bytes
    version = whole_bytes if every == 1 else whole_bytes / every + patch
    return int(version + checkpoint_bytes(parameters, remainders=narrow) / checkpoint_every)


def checkpoint_bytes(parameters: int, *, remainders: bool) -> int:
    """Bytes of AdamW's moments and of the halves of float32 that bfloat16 weights leave out."""
    return (10 if remainders else 8) * parameters


def with_keep_every(config: Config, policy: Manifest) -> Config:
    """The configuration for `run started` of a run with this version 0: what it keeps is decided
    once, when it begins."""
    every = keep_every(config, policy.dtype, policy.bytes)
    return msgspec.structs.replace(
        config, store=msgspec.structs.replace(config.store, keep_every=every)
    )


def deletes(config: Config, started: RunStarted) -> str:
    """What to say of a new run that deletes versions without being asked to; empty: nothing."""
    asked = config.store.keep_every
    every = keep_every_of(asked, started)
    if asked != "auto" or not every:
        return ""
    added = bytes_per_step(config, started.policy.dtype, started.policy.bytes)
    return (
        f"a step adds {added / 1e9:.1f} GB to the store: every {every}th checkpoint stays, and "
        "`dora-pipe export policy RUN N DIR` makes any other again (store.keep_every = 0 keeps "
        "all)"
    )


def keep_every_of(asked: int | Literal["auto"], started: RunStarted) -> int:
    """`store.keep_every` of a run that has begun: what is asked now, else what it began with."""
    return int(started.config["store"]["keep_every"]) if asked == "auto" else asked

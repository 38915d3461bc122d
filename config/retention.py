"""Storage settings of a run as numbers."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.policy import Manifest, PolicyDtype

DELTAS: Final = 8
"""`policies.full_every = "auto"` if a delta is a few hundredths of the whole."""

DELTA_CHANGED_SHARE: Final = 0.03
"""Share of bfloat16 weights that a step changes at a learning rate of 1e-6 (docs/storage.md)."""

DELTA_BYTES: Final = 2.4
"""Bytes of a delta per changed weight."""

KEPT_ALL_BYTES: Final = 2**30
"""`store.keep_every = "auto"` keeps everything below this many bytes per step."""

KEPT_CHECKPOINTS: Final = 10
"""`store.keep_every = "auto"` above that: a deleted version is at most a hundred steps from a
checkpoint with the default `trainer.checkpoint_every`."""


def full_every(config: Config, dtype: PolicyDtype) -> int:
    """Return `policies.full_every` as a number."""
    asked = config.policies.full_every
    if asked != "auto":
        return asked
    small = dtype == "bfloat16" and not config.lora.rank
    return DELTAS if small else 1


def keep_every(config: Config, dtype: PolicyDtype, whole_bytes: int) -> int:
    """Return `store.keep_every` of a new run as a number."""
    asked = config.store.keep_every
    if asked != "auto":
        return asked
    return 0 if bytes_per_step(config, dtype, whole_bytes) < KEPT_ALL_BYTES else KEPT_CHECKPOINTS


def bytes_per_step(config: Config, dtype: PolicyDtype, whole_bytes: int) -> int:
    """Return the average bytes per step: a version and its share of an AdamW checkpoint."""
    every, checkpoint_every = full_every(config, dtype), config.trainer.checkpoint_every
    narrow = dtype == "bfloat16"
    parameters = whole_bytes // (2 if narrow else 4)
    delta = DELTA_CHANGED_SHARE * DELTA_BYTES * parameters if narrow else whole_bytes
    version = whole_bytes if every == 1 else whole_bytes / every + delta
    return int(version + checkpoint_bytes(parameters, remainders=narrow) / checkpoint_every)


def checkpoint_bytes(parameters: int, *, remainders: bool) -> int:
    """Return the bytes of AdamW's moments and of the float32 remainders of bfloat16 weights."""
    return (10 if remainders else 8) * parameters


def with_keep_every(config: Config, policy: Manifest) -> Config:
    """Return the configuration for `run started` with `store.keep_every` as a number."""
    every = keep_every(config, policy.dtype, policy.bytes)
    return msgspec.structs.replace(
        config, store=msgspec.structs.replace(config.store, keep_every=every)
    )


def deletes(config: Config, started: RunStarted) -> str:
    """Return a note on a new run that deletes versions by default, or an empty string."""
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
    """Return `store.keep_every` of a started run: the current value, else the initial one."""
    return int(started.config["store"]["keep_every"]) if asked == "auto" else asked

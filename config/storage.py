"""Sections about what a run keeps beside its log: versions, checkpoints, and where they lie. See
`model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from dora_pipe.config.section import NonNegative, PositiveFloat, Section, WholeEvery
from dora_pipe.schemas.policy import PolicyDtype

if TYPE_CHECKING:
    from dora_pipe.config.model import Config

PATCHES: Final = 8
"""`policies.whole_every = "auto"` where a patch is a few hundredths of the whole."""


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
    float32 and of adapters, or with `transfers.ahead`."""


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
    keep_every: NonNegative = 0
    """Keep every so many checkpoints for ever, beside what is pinned, and delete other versions;
    replay makes them again. 0 keeps everything."""


def whole_every(config: Config, dtype: PolicyDtype) -> int:
    """`policies.whole_every` of a run that publishes in this type, as a number."""
    asked = config.policies.whole_every
    if asked != "auto":
        return asked
    small = dtype == "bfloat16" and not config.lora.rank
    return PATCHES if small and not config.transfers.ahead else 1


def ahead_problem(config: Config) -> str:
    """Why nothing would travel while it is written although `transfers.ahead` asks for it; empty:
    it does, or is not asked for."""
    if not config.transfers.ahead:
        return ""
    if config.transfers.kind != "flight":
        return "versions come from peers, with transfers.kind = 'flight'"
    if not config.store.url:
        return "without a store.url all workers read the trainer's own file"
    if config.policies.whole_every not in (1, "auto"):
        return "what travels is whole, with policies.whole_every = 1 or 'auto'"
    return ""

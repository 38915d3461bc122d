"""Training steps of a GPU report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from dora_pipe.config.section import ComputeDtype, OptimizerName
from dora_pipe.consumers.learners.settings import Packing
from dora_pipe.schemas.policy import PolicyDtype

GROUP: Final = 2
"""Rows of a group, rewards 1 and 0."""

TINY: Final = "--tiny"
"""Option to run on a CPU."""

TINY_TOKENS: Final = 64
"""Tokens per row of the tiny model."""


class StepCase(msgspec.Struct, frozen=True, kw_only=True):
    """Step of `rows` rows."""

    model: str = "0.6B"
    rows: int = 2
    row_tokens: int = 2048
    last_tokens: int = 0
    """Tokens of the last row of every group, if shorter."""
    pass_tokens: int = 4096
    policies: PolicyDtype = "bfloat16"
    """Published dtype; masters are float32."""
    compute: ComputeDtype = "float32"
    """Dtype of the passes (`trainer.dtype`)."""
    optimizer: OptimizerName = "adamw"
    gradient_checkpointing: bool = True
    activation_offload: bool = False
    leaving: bool = False
    """Whether the trainer offloads between steps (`trainer.offload_between_steps`)."""
    packing: Packing = False
    steps: int = 2
    digest: bool = False
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        return sum(map(self.tokens_of, range(self.rows)))

    def tokens_of(self, row: int) -> int:
        return (row % GROUP == GROUP - 1 and self.last_tokens) or self.row_tokens

    @property
    def needs(self) -> str:
        """Package required to measure the case."""
        return "bitsandbytes" if self.optimizer == "adamw8bit" else ""


def cases_of(name: str) -> list[StepCase]:
    return _SETS[name]()


def _ways() -> list[StepCase]:
    plain = StepCase(row_tokens=TINY_TOKENS, pass_tokens=TINY_TOKENS, digest=True, steps=1)
    small = with_(plain, model="tiny", rows=4)
    half = with_(small, compute="bfloat16")
    return [
        small,
        with_(small, policies="float32"),
        with_(small, gradient_checkpointing=False),
        with_(small, activation_offload=True),
        with_(small, leaving=True),
        with_(small, packing=True, last_tokens=16, pass_tokens=256),
        half,
        with_(half, gradient_checkpointing=False),
        with_(half, activation_offload=True),
        with_(small, optimizer="muon"),
        with_(small, optimizer="muon"),
    ]


def _long() -> list[StepCase]:
    """Return a row of 32,000 tokens with a short one for an advantage."""
    row = StepCase(row_tokens=32_000, last_tokens=256, pass_tokens=32_000, steps=1)
    half = with_(row, compute="bfloat16")
    return [half, with_(half, activation_offload=True), row]


def _small() -> list[StepCase]:
    short = StepCase(model="0.6B", compute="bfloat16")
    long = with_(short, rows=8)
    return [long, with_(long, pass_tokens=16_384), short, with_(long, compute="float32")]


def _middle() -> list[StepCase]:
    short = StepCase(model="1.7B", compute="bfloat16")
    long = with_(short, rows=8)
    return [long, short, with_(long, compute="float32", steps=1)]


def _large() -> list[StepCase]:
    short = StepCase(model="4B", compute="bfloat16", steps=1)
    long = with_(short, rows=8)
    return [long, short, with_(long, compute="float32")]


def tiny(case: StepCase) -> StepCase:
    rows_at_once = max(1, case.pass_tokens // case.row_tokens)
    return with_(
        case,
        model="tiny",
        row_tokens=TINY_TOKENS,
        last_tokens=min(case.last_tokens, TINY_TOKENS // 4),
        pass_tokens=rows_at_once * TINY_TOKENS,
        device="cpu",
    )


def with_(case: StepCase, **more: Any) -> StepCase:
    return msgspec.structs.replace(case, **more)


_SETS: Final[dict[str, Callable[[], list[StepCase]]]] = {
    "ways": _ways,
    "0.6B": _small,
    "1.7B": _middle,
    "4B": _large,
    "long": _long,
}

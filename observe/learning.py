"""The figures of a step by which one sees whether a policy learns; the same for every view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

LEARNING: Final[Mapping[str, str]] = {
    "loss": "Loss of the step, by its objective.",
    "grad_norm": "Mean norm of the updates' gradients, before they are clipped.",
    "entropy": "Mean -log-prob of the batch's sampled tokens: an estimate, nats per token.",
    "truncated": "Share of the batch's trajectories that a limit of tokens or turns ended.",
    "kl": "Mean KL estimate to the reference, per token.",
    "clipped_share": "Share of trained tokens whose gradient the clip took away.",
    "learning_rate": "Learning rate of the step, by its schedule.",
}
"""Names, and what each says. docs/observe.md defines them."""

RATE: Final = "trainer.learning_rate"


def learning_of(figures: Mapping[str, float], settings: Mapping[str, Any]) -> dict[str, float]:
    """Return those figures that a commit has; `settings` are those of its batch."""
    rate = settings.get(RATE)
    known = {**figures, **({"learning_rate": rate} if isinstance(rate, float) else {})}
    return {name: known[name] for name in LEARNING if name in known}

"""What commands show as their defaults and what does their work uses too: it imports nothing."""

from __future__ import annotations

from typing import Final

TORCH: Final = "torch"
"""The engine that needs nothing of a model but its family."""

PARADIGM_NAMES: Final = ("sync", "one-step", "dora", "interruptible")
"""As `config.paradigms` has them."""

OBJECTIVE_NAMES: Final = (
    "grpo",
    "dapo",
    "dr-grpo",
    "decoupled-ppo",
    "tis",
    "cispo",
    "topr",
    "weighted-topr",
    "gspo",
    "icepop",
    "mis",
    "geometric",
)
"""As `bench.offpolicy` compares them."""

SFT_STEPS: Final = 240
SFT_BATCH: Final = 64
SFT_LEARNING_RATE: Final = 2e-3
SFT_SEED: Final = 3
SFT_STEPS_OF: Final = {"arithmetic": SFT_STEPS, "calculator": 300}
"""Steps after which a policy gets a part of the task right, and has something left to learn."""

EXAMPLES: Final = tuple(SFT_STEPS_OF)

REWARD_MIN: Final = 0.85
"""The demo has failed when the last policy's evaluation reward is below."""

OFFPOLICY_STEPS: Final = 36
"""Of every cell of the study."""

CLAIM_HOURS: Final = 1.0
"""Values that no record claims are older before `prune` names them: `history.prune_claims`."""

"""Names damaged trajectories behind the sound ones: lines on stderr, and exit code 5."""

from __future__ import annotations

from dora_pipe.bus.logged import Damage
from dora_pipe.core.console import say


def raise_if_damaged(damage: Damage, consequence: str) -> None:
    """Say which; raises InvariantBroken where there are any. `consequence`: what came of it."""
    for line in damage.lines:
        say(line)
    damage.raise_if_any(consequence)

"""Decides what a group has come to, from its siblings' results alone."""

from __future__ import annotations

from typing import Final

from dora_pipe.config.model import Groups
from dora_pipe.orchestrator.state import Group, Verdict

COMPLETE: Final = Verdict(fate="trained", why="complete")
"""All siblings ended and enough are valid: the group waits for its batch. Not a fate yet."""


def verdict_of(group: Group, rules: Groups) -> Verdict | None:
    """`COMPLETE`, the fate that is now certain, or None while siblings still matter.

    A group that can no longer reach `min_valid_siblings` fails at once: its other siblings are
    not waited for, whatever their length. Nothing else ends a group before its last sibling.
    """
    size = group.spec.size
    if group.spec.purpose == "eval":
        return _evaluated(group) if group.ended == size else None
    needed = min(rules.min_valid_siblings, size)
    if size - (group.ended - group.valid) < needed:
        return Verdict(
            fate="failed", why=f"{group.ended - group.valid} of {size} siblings are not valid"
        )
    if group.ended < size:
        return None
    if rules.filter_zero_advantage and _all_equal(group):
        return Verdict(fate="filtered", why="all valid rewards are equal: no advantage")
    return COMPLETE


def _evaluated(group: Group) -> Verdict:
    rewards = [one.reward for one in group.results if one is not None and one.reward is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.4f}" if rewards else "no valid reward"
    return Verdict(fate="evaluated", why=f"{mean} over {len(rewards)} of {group.spec.size}")


def _all_equal(group: Group) -> bool:
    rewards = {one.reward for one in group.results if one is not None and one.reward is not None}
    return len(rewards) <= 1

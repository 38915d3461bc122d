"""Which function each kind of objective is, and what all of them share: masks and the KL term.

Masks and KL are added here and nowhere else, so every kind can have them. A token that is left
out has no loss and no KL, but still counts in the mean: how much the others weigh must not depend
on how many are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Protocol

from dora_pipe.config.objectives import Kind, Proximal
from dora_pipe.consumers.objectives.grpo import decoupled_ppo, grpo, gspo, tis
from dora_pipe.consumers.objectives.kl import ESTIMATES
from dora_pipe.consumers.objectives.masks import kept_tokens
from dora_pipe.consumers.objectives.reinforce import cispo, topr, weighted_topr
from dora_pipe.consumers.objectives.terms import Inputs, Knobs, Terms

Rule = Callable[[Inputs, Knobs], Terms]

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "grpo": grpo,
        "dapo": grpo,
        "dr-grpo": grpo,
        "decoupled-ppo": decoupled_ppo,
        "tis": tis,
        "cispo": cispo,
        "topr": topr,
        "weighted-topr": weighted_topr,
        "gspo": gspo,
    }
)
"""By `objective.kind`. DAPO and Dr. GRPO differ from GRPO by their keys alone."""


class Chosen(Knobs, Protocol):
    """Knobs with the kind they are for."""

    @property
    def kind(self) -> Kind: ...
    @property
    def proximal(self) -> Proximal: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Which log-probs the trainer must compute beside those of the policy it trains."""

    reference: bool
    """Of version 0."""
    proximal: bool
    """Of the step's first weights."""


def needs(chosen: Chosen) -> Needs:
    """What an objective asks of the trainer."""
    return Needs(reference=bool(chosen.kl), proximal=chosen.proximal == "recomputed")


def terms_of(inputs: Inputs, chosen: Chosen) -> Terms:
    """The loss of every token, masks and KL included.

    Example: ``(terms_of(inputs, settings).loss * weights).sum().backward()`` with `token_weights`.
    """
    if chosen.mask == "none":
        return _with_kl(RULES[chosen.kind](inputs, chosen), inputs, chosen)
    assert chosen.mask_low is not None
    assert chosen.mask_high is not None
    kept = kept_tokens(inputs, chosen.mask, low=chosen.mask_low, high=chosen.mask_high)
    inputs = inputs.without(kept)
    terms = _with_kl(RULES[chosen.kind](inputs, chosen), inputs, chosen)
    loss = terms.loss.where(kept, terms.loss.new_zeros(()))
    return replace(terms, loss=loss, kept=kept if terms.kept is None else kept & terms.kept)


def _with_kl(terms: Terms, inputs: Inputs, chosen: Chosen) -> Terms:
    if not chosen.kl:
        return terms
    assert inputs.reference is not None
    estimate = ESTIMATES[chosen.kl_estimate](inputs.logprobs, inputs.reference)
    return replace(terms, loss=terms.loss + chosen.kl * estimate, kl=estimate.detach())

"""Objectives by name, and their shared masks, KL term and teacher.

Masked tokens still count in the mean, so other tokens keep their weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dora_pipe.config.model import Config, Objective
from dora_pipe.config.objectives import BUILT_IN, WHOLE, Mask, is_own
from dora_pipe.consumers.objectives.terms import Inputs, Terms, row_geometric, row_ratios
from dora_pipe.core.errors import ConfigError
from dora_pipe.core.system.own_code import load_attribute, load_kind

if TYPE_CHECKING:
    from torch import Tensor

KEY: Final = "objective.kind"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveKind:
    """Function and options of an objective."""

    terms: Callable[[Inputs, Any], Terms]
    """Pure loss per token, without torch import; second argument: the options or [objective]."""
    options: type[Any] | None = None
    per_token: bool = False
    """True if a token's loss depends on no other token."""

    def argument(self, keys: Objective) -> Any:
        """Return the second argument of `terms`. Raises ConfigError for unknown options."""
        if self.options is None:
            if keys.options:
                raise ConfigError(f"objective.options: {keys.kind} has no options")
            return keys
        declared: Any = msgspec.inspect.type_info(self.options)
        fields = sorted(field.name for field in declared.fields)
        if odd := sorted(keys.options.keys() - set(fields)):
            raise ConfigError(
                f"objective.options.{odd[0]}: {keys.kind} has no such option",
                hint=f"there are {', '.join(fields)}",
            )
        try:
            return msgspec.convert(keys.options, self.options)
        except msgspec.ValidationError as error:
            what, _, key = str(error).partition(" - at `$")
            what = what[0].lower() + what[1:]
            raise ConfigError(f"objective.options{key.rstrip('`')}: {what}") from None


def objective_kind(name: str, directory: str = "") -> ObjectiveKind:
    """Return an objective, importing user code from `directory`. Raises ConfigError if it is not
    one."""
    if is_own(name):
        hint = "docs/training.md describes objectives"
        return load_kind(KEY, name, ObjectiveKind, {}, directory=directory, hint=hint)
    loaded = load_attribute(KEY, f"{__package__}.{BUILT_IN[name].function}")
    return loaded if isinstance(loaded, ObjectiveKind) else ObjectiveKind(terms=loaded)


def need_objective(config: Config) -> None:
    """Raise ConfigError if the objective is unusable."""
    objective_kind(config.objective.kind, config.task.directory).argument(config.objective)


def needs_reference(keys: Objective) -> bool:
    """Return whether the trainer must compute log-probs of version 0."""
    return bool(keys.kl_coef)


def with_teacher(inputs: Inputs, keys: Objective) -> Inputs:
    """Add weight (log T - log pi_theta) to every token's advantage; T is the teacher.

    On-policy, the gradient is that of -weight KL(pi_theta, T): reverse KL of on-policy distillation
    (Agarwal et al., arXiv 2306.13649, section 3; Thinking Machines, "On-Policy Distillation",
    2025). Off-policy, the objective's ratio multiplies it. pi_theta is detached here.
    """
    if not keys.teacher_weight:
        return inputs
    assert inputs.teacher is not None
    gap = inputs.teacher - inputs.logprobs.detach()
    return replace(inputs, advantages=inputs.advantages + keys.teacher_weight * gap)


def needs_whole(keys: Objective) -> bool:
    """Return whether a token's loss may depend on other tokens of its trajectory."""
    if keys.mask in ("sequence", "geometric"):
        return True
    if is_own(keys.kind):
        return not objective_kind(keys.kind).per_token
    return keys.kind in WHOLE or keys.level == "sequence"


def needs_proximal(keys: Objective) -> bool:
    """Return whether the trainer must compute log-probs of the step's first weights."""
    return keys.proximal == "recomputed"


def terms_of(inputs: Inputs, keys: Objective) -> Terms:
    """Return the loss of every token, masks and KL included."""
    kind = objective_kind(keys.kind)
    argument = kind.argument(keys)
    inputs = with_teacher(inputs, keys)
    if keys.mask in (None, "none"):
        return _with_kl(kind.terms(inputs, argument), inputs, keys)
    assert keys.mask_low is not None
    assert keys.mask_high is not None
    kept = kept_tokens(inputs, keys.mask, low=keys.mask_low, high=keys.mask_high)
    inputs = inputs.without(kept)
    terms = _with_kl(kind.terms(inputs, argument), inputs, keys)
    loss = terms.loss.where(kept, terms.loss.new_zeros(()))
    return replace(terms, loss=loss, kept=kept if terms.kept is None else kept & terms.kept)


# Masks of tokens on which trainer and engine disagree


def kept_tokens(inputs: Inputs, mask: Mask, *, low: float, high: float) -> Tensor:
    """Return bool [N]: low <= ratio <= high.

    The ratio is proximal / behavior (engine error only) if the trainer computed proximal log-probs,
    else pi_theta / behavior.

    token: per token (IcePop, Ring-1T, arXiv 2510.18855).
    sequence: product over the trajectory (masked importance sampling, richardli.xyz/rl-collapse).
    geometric: that product to the power 1 / length (same source, part 3).
    """
    trained = inputs.logprobs if inputs.proximal is None else inputs.proximal
    log_ratio = (trained - inputs.behaviour).detach()
    if mask == "sequence":
        ratio = row_ratios(log_ratio, inputs.lengths)
    elif mask == "geometric":
        ratio = row_geometric(log_ratio, inputs.lengths)
    else:
        assert mask == "token"
        ratio = log_ratio.exp()
    return (ratio >= low) & (ratio <= high)


# Estimates of KL(pi_theta, pi_ref) per token (Schulman, joschu.net/blog/kl-approx.html); log_r is
# log pi_ref - log pi_theta. On-policy mean: KL for k1 and k3, nearly KL for k2. Mean gradient: zero
# for k1 (only noise), that of KL for k2, of KL(pi_ref, pi_theta) for k3.


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """-log_r; may be negative."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log_r ^ 2 / 2; never negative."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """r - log_r - 1; never negative (GRPO, arXiv 2402.03300, equation 4)."""
    log_r = reference - logprobs
    return log_r.exp() - log_r - 1.0


ESTIMATES: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {"k1": k1, "k2": k2, "k3": k3}


def _with_kl(terms: Terms, inputs: Inputs, keys: Objective) -> Terms:
    if not keys.kl_coef:
        return terms
    assert inputs.reference is not None
    assert keys.kl_estimate is not None
    estimate = ESTIMATES[keys.kl_estimate](inputs.logprobs, inputs.reference)
    return replace(terms, loss=terms.loss + keys.kl_coef * estimate, kl=estimate.detach())

"""Tests of every objective, also a user's own: gradients, masks, the KL term and no NaN."""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from dora_pipe.config.model import Objective
from dora_pipe.config.objectives import BUILT_IN, MAY_LACK, Advantage, Level, Mask, uses
from dora_pipe.consumers.objectives.advantage import batch_advantages
from dora_pipe.consumers.objectives.registry import ESTIMATES, kept_tokens, needs_proximal, terms_of
from dora_pipe.consumers.objectives.terms import Inputs
from dora_pipe.core.system.own_code import importable
from dora_pipe.schemas.wire import REWARD_MAX
from tests.support.objectives import chosen, gradient, random_inputs, rows, weights_of, worth_of

Value = Callable[[Inputs, Objective, Tensor], Callable[[Tensor], Tensor]]
"""With inputs, keys and the tokens that are kept: J of every token as a function of log-probs
alone, as its paper writes it. What has no gradient is held still."""

LENGTHS = (3, 1, 4, 2)
GUIDE = Path(__file__).parents[2] / "docs" / "training.md"
few = hypothesis_settings(max_examples=8)
seeds = st.integers(0, 2**32 - 1)


def clipped(inputs: Inputs, keys: Objective, kept: Tensor) -> Callable[[Tensor], Tensor]:
    weight = torch.ones_like(inputs.behaviour)
    worth = worth_of(inputs, keys)
    if inputs.proximal is not None and keys.max_weight is not None:
        log_weight = inputs.proximal - inputs.behaviour
        if keys.level == "sequence":
            sums = [part.sum().expand(len(part)) for part in rows(inputs, log_weight)]
            log_weight = torch.cat(sums)
        weight = log_weight.exp()
        if keys.kind == "decoupled-ppo":
            weight = weight.where(weight <= keys.max_weight, torch.zeros(()).double())
        weight = weight.clamp(max=keys.max_weight)

    def ratio_of(log_ratio: Tensor) -> Tensor:
        if keys.kind != "gspo":
            return log_ratio.exp()
        parts = zip(rows(inputs, log_ratio), rows(inputs, kept), strict=True)
        means = [part[of].mean() if of.any() else part.detach().new_zeros(()) for part, of in parts]
        spread = [mean.expand(length) for mean, length in zip(means, inputs.lengths, strict=True)]
        return torch.cat(spread).exp()

    def value(logprobs: Tensor) -> Tensor:
        ratio = ratio_of(logprobs - inputs.around)
        assert keys.clip_low is not None and keys.clip_high is not None
        cut = ratio.clip(1 - keys.clip_low, 1 + keys.clip_high)
        return weight * torch.minimum(ratio * worth, cut * worth)

    return value


def weighted(inputs: Inputs, keys: Objective, kept: Tensor) -> Callable[[Tensor], Tensor]:
    held = weights_of(inputs, keys) * worth_of(inputs, keys)
    return lambda logprobs: held * logprobs


def gated(inputs: Inputs, keys: Objective, kept: Tensor) -> Callable[[Tensor], Tensor]:
    def value(logprobs: Tensor) -> Tensor:
        ratio = (logprobs - inputs.around).exp()
        tau = torch.where(inputs.advantages >= 0, 2.0, 1.05).double()
        return inputs.advantages * 4 / tau / (1 + (-tau * (ratio - 1)).exp())

    return value


@dataclass(frozen=True)
class Subject:
    kind: str
    value: Value
    keys: dict[str, Any] = field(default_factory=dict)

    def chosen(self, **keys: Any) -> Objective:
        allowed = uses({"kind": self.kind, **keys}) | MAY_LACK | {"options"}
        return chosen(self.kind, **{k: v for k, v in {**self.keys, **keys}.items() if k in allowed})


@pytest.fixture(scope="module", autouse=True)
def sapo(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("own")
    (block,) = re.findall(r"```python\n(# sapo.py.*?)```", GUIDE.read_text(), re.DOTALL)
    (folder / "sapo.py").write_text(block)
    sys.modules.pop("sapo", None)
    with importable(str(folder)):
        __import__("sapo")


WEIGHTED = ("cispo", "topr", "weighted-topr", "distill")
SUBJECTS = [
    *(
        Subject(kind, weighted if kind in WEIGHTED else clipped, keys)
        for kind, row in BUILT_IN.items()
        for keys in [{"level": one} for one in get_args(Level) if "level" in row.keys] or [{}]
    ),
    Subject("gspo", clipped, {"clip_low": 0.1, "clip_high": 0.15}),
    Subject("cispo", weighted, {"clip_low": 0.1, "clip_high": 0.1}),
    Subject("weighted-topr", weighted, {"positive_weight": 0.7, "negative_weight": 1.6}),
    Subject("distill", weighted, {"teacher_weight": 0.3, "clip_high": 0.1}),
    Subject("grpo", clipped, {"teacher_weight": 0.5}),
    Subject("weighted-topr", weighted, {"teacher_weight": 2.0, "negative_weight": 0.5}),
    Subject("sapo:SAPO", gated, {"options": {"tau_good": 2.0}}),
]
subjects = pytest.mark.parametrize(
    "subject", SUBJECTS, ids=lambda value: f"{value.kind}-{value.keys}"
)


@subjects
def test_gradient_is_the_slope_of_the_value_under_every_mask_advantage_and_kl(
    subject: Subject,
) -> None:
    for mask, kl in product(get_args(Mask), (None, *ESTIMATES)):
        check_gradient(subject, mask, kl)


def check_gradient(subject: Subject, mask: Mask, kl: str | None) -> None:
    bounds = {"mask_low": 0.8, "mask_high": 1.3} if mask != "none" else {}
    keys = subject.chosen(
        mask=mask, **bounds, **({"kl_coef": 0.3, "kl_estimate": kl} if kl else {})
    )
    inputs = random_inputs(1, LENGTHS, proximal=needs_proximal(keys))
    rules = get_args(Advantage)
    rule = rules[len(str(subject.keys) + mask + str(kl)) % len(rules)]
    (worth,) = batch_advantages([(0, [1.0, 0.25, -0.5, 0.0])], rule, True)
    spread = torch.tensor(worth, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    inputs = replace(inputs, advantages=spread)
    kept = torch.ones(10, dtype=torch.bool)
    if mask != "none":
        kept = kept_tokens(inputs, mask, low=0.8, high=1.3)
        assert 0 < kept.sum() < 10
    value = subject.value(inputs, keys, kept)

    def loss_at(logprobs: Tensor) -> Tensor:
        logprobs = logprobs.where(kept, logprobs.detach())
        loss = -value(logprobs)
        if keys.kl_coef:
            assert inputs.reference is not None and keys.kl_estimate is not None
            loss = loss + keys.kl_coef * ESTIMATES[keys.kl_estimate](logprobs, inputs.reference)
        return loss.where(kept, torch.zeros(()).double()).sum()

    point = inputs.logprobs.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(loss_at, (point,), eps=1e-7, atol=1e-5)
    torch.autograd.backward(loss_at(point))
    assert point.grad is not None
    assert torch.allclose(gradient(inputs, keys), point.grad, atol=1e-12)
    assert terms_of(inputs, keys).loss.sum().item() == pytest.approx(loss_at(point).item())


@subjects
@pytest.mark.parametrize("proximal", ["behaviour", "recomputed"])
@few
@given(seed=seeds, lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_on_policy_every_objective_has_the_gradient_of_plain_policy_gradient(
    subject: Subject, proximal: str, seed: int, lengths: list[int]
) -> None:
    keys = subject.chosen(proximal=proximal, positive_weight=1.0, negative_weight=1.0)
    inputs = random_inputs(seed, lengths, on_policy=True, proximal=needs_proximal(keys))
    assert torch.allclose(gradient(inputs, keys), -worth_of(inputs, keys), atol=1e-12)


@subjects
@few
@given(seed=seeds)
def test_what_one_trajectory_loses_does_not_depend_on_its_neighbours(
    subject: Subject, seed: int
) -> None:
    keys = subject.chosen()
    inputs = random_inputs(seed, [3, 5], proximal=needs_proximal(keys))
    terms = terms_of(inputs, keys)
    for index, length in ((0, 3), (3, 5)):
        part = slice(index, index + length)
        alone = replace(
            inputs,
            logprobs=inputs.logprobs[part],
            behaviour=inputs.behaviour[part],
            advantages=inputs.advantages[part],
            teacher=None if inputs.teacher is None else inputs.teacher[part],
            proximal=None if inputs.proximal is None else inputs.proximal[part],
            lengths=(length,),
        )
        assert torch.allclose(terms_of(alone, keys).loss, terms.loss[part], rtol=1e-9)


@subjects
@few
@given(seed=seeds)
def test_a_trajectory_without_advantage_has_no_gradient(subject: Subject, seed: int) -> None:
    keys = subject.chosen()
    inputs = random_inputs(seed, [4, 2], proximal=needs_proximal(keys))
    nothing = replace(
        inputs, advantages=torch.zeros(6, dtype=torch.float64), teacher=inputs.logprobs.detach()
    )
    assert not gradient(nothing, keys).any()


@subjects
def test_only_the_loss_carries_a_gradient_and_every_token_has_all(subject: Subject) -> None:
    keys = subject.chosen(mask="token")
    terms = terms_of(random_inputs(1, LENGTHS, proximal=needs_proximal(keys)), keys)
    assert terms.loss.requires_grad and terms.loss.shape == (10,)
    for entry in (terms.ratio, terms.clipped, terms.kept, terms.weight):
        assert entry is None or (entry.shape == (10,) and not entry.requires_grad)
    assert terms.clipped.dtype == torch.bool


@subjects
@pytest.mark.parametrize("mask", ["token", "sequence", "geometric"])
@few
@given(seed=seeds, kl=st.sampled_from([0.0, 0.2]))
def test_mask_leaves_out_exactly_the_tokens_beyond_its_bounds(
    subject: Subject, mask: Mask, seed: int, kl: float
) -> None:
    plain = subject.chosen(kl_coef=kl)
    masked = subject.chosen(mask=mask, mask_low=0.8, mask_high=1.3, kl_coef=kl)
    inputs = random_inputs(seed, [3, 1, 4], proximal=needs_proximal(plain))
    before, after = terms_of(inputs, plain), terms_of(inputs, masked)
    trained = inputs.logprobs if inputs.proximal is None else inputs.proximal
    expected: list[bool] = []
    for part in rows(inputs, (trained - inputs.behaviour).detach()):
        full = part.sum() if mask == "sequence" else part.mean()
        ratio = part.exp() if mask == "token" else full.exp().expand(len(part))
        expected += [0.8 <= entry <= 1.3 for entry in ratio.tolist()]
    kept = torch.tensor(expected)
    own = kept if before.kept is None else kept & before.kept
    assert after.kept is not None and torch.equal(after.kept, own)
    if (subject.kind, mask) != ("gspo", "token"):  # there one ratio is that of all that are kept
        assert torch.equal(after.loss[kept], before.loss[kept])
        assert torch.allclose(gradient(inputs, masked)[kept], gradient(inputs, plain)[kept])
    assert not after.loss[~kept].any()
    assert not gradient(inputs, masked)[~kept].any()


@subjects
@pytest.mark.parametrize("behaviour", [-2000.0, 2000.0])
def test_mask_leaves_out_an_infinite_ratio_without_a_trace_in_the_gradient(
    subject: Subject, behaviour: float
) -> None:
    keys = subject.chosen(mask="token", proximal="behaviour")
    inputs = random_inputs(2, [4])
    far = inputs.behaviour.clone()
    far[1] = behaviour
    actual_gradient = gradient(replace(inputs, behaviour=far), keys)
    assert actual_gradient.isfinite().all()
    assert actual_gradient[1] == 0


@subjects
@pytest.mark.parametrize("advantage", get_args(Advantage))
@pytest.mark.parametrize("divided", [False, True])
@few
@given(
    rewards=st.lists(
        st.one_of(st.floats(-REWARD_MAX, REWARD_MAX), st.sampled_from([-REWARD_MAX, REWARD_MAX])),
        min_size=4,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
def test_every_reward_that_a_task_may_give_has_a_finite_loss_and_gradient(
    subject: Subject, advantage: Advantage, divided: bool, rewards: list[float], seed: int
) -> None:
    keys = subject.chosen()
    (worth,) = batch_advantages([(0, rewards)], advantage, divided)
    inputs = random_inputs(seed, LENGTHS, proximal=needs_proximal(keys))
    inputs = replace(  # float32, as a trainer has them
        inputs,
        advantages=torch.tensor(worth).repeat_interleave(torch.tensor(LENGTHS)),
        logprobs=inputs.logprobs.detach().float().requires_grad_(),
    )
    loss = terms_of(inputs, keys).loss.float().sum()
    (slope,) = torch.autograd.grad(loss, [inputs.logprobs])
    assert math.isfinite(loss.detach())
    assert math.isfinite(slope.square().sum())

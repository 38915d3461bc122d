"""The objective against a second implementation, written from the equations, and its gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dora_pipe.consumers.objectives.registry import k3, terms_of
from dora_pipe.consumers.objectives.terms import Inputs, Terms, row_figures
from tests.support.objectives import chosen

LOW, HIGH = 0.2, 0.28
number = st.floats(-3, -0.01, allow_subnormal=False)
token = st.tuples(number, number, st.floats(-2, 2, allow_subnormal=False), number)


def by_hand(
    logprob: float, behaviour: float, advantage: float, reference: float, kl: float
) -> float:
    """-J of one token, from the equations, case by case instead of by a minimum."""
    ratio = math.exp(logprob - behaviour)
    kept = min(ratio, 1 + HIGH) if advantage >= 0 else max(ratio, 1 - LOW)
    gain = kept * advantage
    r = math.exp(reference) / math.exp(logprob)
    return -(gain - kl * (r - math.log(r) - 1))


def terms(tokens: list[tuple[float, float, float, float]], kl: float) -> tuple[Tensor, Terms]:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    logprobs, behaviour, advantages, reference = columns
    logprobs.requires_grad_()
    inputs = Inputs(
        logprobs=logprobs,
        behaviour=behaviour,
        advantages=advantages,
        lengths=[len(tokens)],
        reference=reference if kl else None,
    )
    return logprobs, terms_of(inputs, chosen("grpo", clip_low=LOW, clip_high=HIGH, kl=kl))


@given(st.lists(token, min_size=1, max_size=6), st.sampled_from([0.0, 0.1]))
def test_loss_is_what_the_equations_say(
    tokens: list[tuple[float, float, float, float]], kl: float
) -> None:
    _, found = terms(tokens, kl)
    expected = [by_hand(*one, kl) for one in tokens]
    assert found.loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.lists(token, min_size=1, max_size=6), st.sampled_from([0.0, 0.1]))
def test_gradient_is_the_slope_of_the_loss(
    tokens: list[tuple[float, float, float, float]], kl: float
) -> None:
    logprobs, found = terms(tokens, kl)
    torch.autograd.backward(found.loss.sum())
    assert logprobs.grad is not None
    step = 1e-6
    for place, (logprob, behaviour, advantage, reference) in enumerate(tokens):
        ratio = math.exp(logprob - behaviour)
        if min(abs(ratio - (1 + HIGH)), abs(ratio - (1 - LOW))) < 1e-4:
            continue  # a corner has no slope
        above = by_hand(logprob + step, behaviour, advantage, reference, kl)
        below = by_hand(logprob - step, behaviour, advantage, reference, kl)
        slope = (above - below) / (2 * step)
        assert logprobs.grad[place].item() == pytest.approx(slope, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.27, 1.0, False),
        (1.29, 1.0, True),
        (0.5, 1.0, False),
        (0.81, -1.0, False),
        (0.79, -1.0, True),
        (5.0, -1.0, False),
        (5.0, 0.0, False),
    ],
)
def test_clip_cuts_the_gradient_only_where_it_would_go_further(
    ratio: float, advantage: float, clipped: bool
) -> None:
    logprobs, found = terms([(math.log(ratio) - 5.0, -5.0, advantage, -5.0)], 0.0)
    torch.autograd.backward(found.loss.sum())
    assert logprobs.grad is not None
    assert found.clipped.tolist() == [clipped]
    assert (logprobs.grad.item() == 0.0) == (clipped or advantage == 0.0)


def test_on_policy_gradient_is_that_of_plain_policy_gradient() -> None:
    logprobs, found = terms([(-1.0, -1.0, 0.7, -1.0)], 0.0)
    torch.autograd.backward(found.loss.sum())
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-0.7)


@given(number, number)
def test_k3_is_never_negative_and_zero_for_the_same_policy(one: float, other: float) -> None:
    estimate = k3(torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))
    assert estimate.item() >= -1e-15
    assert k3(torch.tensor(one), torch.tensor(one)).item() == 0.0


def test_figures_of_each_trajectory_are_those_of_its_own_tokens() -> None:
    tokens = [(-1.0, -1.0, 1.0, -1.0), (-1.0, -2.0, 1.0, -1.0), (-2.0, -1.0, -1.0, -1.5)]
    _, found = terms(tokens, 0.5)
    weights = torch.tensor([0.5, 0.5, 0.25], dtype=torch.float64)
    first, second = row_figures(found, weights, [2, 1])
    assert first.ratio_min == pytest.approx(1.0)
    assert first.ratio_max == pytest.approx(math.e)
    assert first.ratio_mean == pytest.approx((1 + math.e) / 2)
    assert first.clipped_share == 0.5
    assert second.clipped_share == 1.0
    assert second.kl == pytest.approx(math.exp(0.5) - 1.5)
    total = float((found.loss.detach() * weights).sum())
    assert first.loss_share + second.loss_share == pytest.approx(total)

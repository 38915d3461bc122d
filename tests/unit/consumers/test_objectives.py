"""Tests of objectives: closed forms, gradients, masks."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dora_pipe.consumers.objectives.registry import k1, k2, k3, terms_of
from dora_pipe.consumers.objectives.terms import Inputs, Terms, row_metrics, row_sums
from tests.support.objectives import chosen, gradient, random_inputs, rows

seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def test_kl_estimates_agree_in_the_mean_and_not_in_their_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, generator=generator, dtype=torch.float64).requires_grad_()
    fixed = (logits + 0.3 * torch.randn(50, generator=generator, dtype=torch.float64)).detach()
    table, other = logits.log_softmax(0), fixed.log_softmax(0)
    exact = (table.exp() * (table - other)).sum()
    chance = table.exp().detach()
    (true,) = torch.autograd.grad(exact, logits, retain_graph=True)
    slopes = {}
    for estimate in (k1, k2, k3):
        mean = (chance * estimate(table, other)).sum()
        assert mean.item() == pytest.approx(exact.item(), rel=0.1)
        (slopes[estimate.__name__],) = torch.autograd.grad(mean, logits, retain_graph=True)
    backwards = (other.exp() * (other - table)).sum()
    (reverse,) = torch.autograd.grad(backwards, logits)
    assert torch.allclose(slopes["k1"], torch.zeros_like(true), atol=1e-12)
    assert torch.allclose(slopes["k2"], true, atol=1e-12)
    assert torch.allclose(slopes["k3"], reverse, atol=1e-12)


# Closed forms.


@given(seed=seeds, lengths=shapes)
def test_ratio_of_gspo_is_the_geometric_mean_of_the_ratios_of_its_tokens(
    seed: int, lengths: list[int]
) -> None:
    inputs = random_inputs(seed, lengths)
    ratio = terms_of(inputs, chosen("gspo")).ratio
    ratios = (inputs.logprobs - inputs.behaviour).detach().exp()
    for mine, part in zip(rows(inputs, ratio), rows(inputs, ratios), strict=True):
        expected = math.prod(part.tolist()) ** (1 / len(part))
        assert mine.tolist() == pytest.approx([expected] * len(part), rel=1e-9)


@given(seed=seeds)
def test_decoupled_ppo_without_a_clip_has_the_ratio_to_the_version_that_sampled(seed: int) -> None:
    inputs = random_inputs(seed, [4, 3], proximal=True)
    wide = {"clip_low": 1e6, "clip_high": 1e6, "max_weight": 1e6}
    decoupled = terms_of(inputs, chosen("decoupled-ppo", **wide)).loss
    ratio = (inputs.logprobs - inputs.behaviour).exp()
    assert torch.allclose(decoupled, -ratio * inputs.advantages, rtol=1e-9)
    assert torch.allclose(terms_of(inputs, chosen("tis", **wide)).loss, decoupled)


@pytest.mark.parametrize("kind", ["decoupled-ppo", "tis"])
def test_without_a_proximal_policy_the_decoupled_kinds_are_grpo(kind: str) -> None:
    inputs = random_inputs(1, [4, 3])
    decoupled = terms_of(inputs, chosen(kind, proximal="behaviour"))
    assert torch.equal(decoupled.loss, terms_of(inputs, chosen("grpo")).loss)
    assert decoupled.weight is None


def test_tis_truncates_the_weight_and_decoupled_ppo_leaves_the_token_out() -> None:
    lengths = (3,)
    logprobs = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    inputs = Inputs(
        logprobs=logprobs.requires_grad_(),
        behaviour=logprobs.detach() - torch.tensor([0.1, 3.0, -1.0], dtype=torch.float64),
        proximal=logprobs.detach().clone(),
        advantages=torch.ones(3, dtype=torch.float64),
        lengths=lengths,
    )
    weights = [math.exp(0.1), math.exp(3.0), math.exp(-1.0)]
    truncated = terms_of(inputs, chosen("tis", max_weight=2.0))
    assert truncated.loss.tolist() == pytest.approx([-weights[0], -2.0, -weights[2]])
    dropped = terms_of(inputs, chosen("decoupled-ppo", max_weight=2.0))
    assert dropped.loss.tolist() == pytest.approx([-weights[0], 0.0, -weights[2]])
    assert dropped.kept is not None
    assert dropped.kept.tolist() == [True, False, True]
    terms = terms_of(inputs, chosen("tis", max_weight=100.0, level="sequence"))
    assert terms.loss.tolist() == pytest.approx([-math.prod(weights)] * 3)


def test_topr_imitates_what_was_good_whatever_its_ratio_and_tapers_what_was_bad() -> None:
    inputs = random_inputs(5, [3, 3, 3])
    far = torch.tensor([-9.0] * 3 + [-9.0] * 3 + [9.0] * 3, dtype=torch.float64)
    worth = torch.tensor([2.0] * 3 + [-2.0] * 3 + [-2.0] * 3, dtype=torch.float64)
    inputs = replace(inputs, behaviour=inputs.logprobs.detach() - far, advantages=worth)
    actual_gradient = gradient(inputs, chosen("topr"))
    assert actual_gradient[:3].tolist() == [-2.0] * 3
    assert actual_gradient[3:6].tolist() == pytest.approx([2 * math.exp(-27.0)] * 3)
    assert actual_gradient[6:].tolist() == [2.0] * 3
    clipped = terms_of(inputs, chosen("topr")).clipped
    assert clipped.tolist() == [False] * 6 + [True] * 3


# Masks.


def test_figures_name_the_weight_and_what_was_left_out() -> None:
    settings = chosen("tis", mask="token", mask_low=0.9, mask_high=1.1)
    inputs = random_inputs(8, [4, 6], proximal=True)
    terms = terms_of(inputs, settings)
    first, _ = row_metrics(terms, torch.ones(10, dtype=torch.float64), inputs.lengths)
    assert terms.kept is not None
    assert terms.weight is not None
    assert first.masked_share == pytest.approx(1 - terms.kept[:4].double().mean().item())
    assert first.weight_mean == pytest.approx(terms.weight[:4].mean().item())
    plain = row_metrics(
        terms_of(inputs, chosen("grpo")), torch.ones(10, dtype=torch.float64), inputs.lengths
    )
    assert plain[0].masked_share is None
    assert plain[0].weight_mean is None


@given(seed=seeds, lengths=shapes)
def test_sums_of_trajectories_are_those_of_their_own_tokens(seed: int, lengths: list[int]) -> None:
    inputs = random_inputs(seed, lengths)
    actual_rows = rows(inputs, row_sums(inputs.behaviour, inputs.lengths))
    for mine, part in zip(actual_rows, rows(inputs, inputs.behaviour), strict=True):
        assert mine.tolist() == pytest.approx([math.fsum(part.tolist())] * len(part))


LOW, HIGH = 0.2, 0.28
number = st.floats(-3, -0.01, allow_subnormal=False)
token = st.tuples(number, number, st.floats(-2, 2, allow_subnormal=False), number)


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
    return logprobs, terms_of(inputs, chosen("grpo", clip_low=LOW, clip_high=HIGH, kl_coef=kl))


def test_figures_of_each_trajectory_are_those_of_its_own_tokens() -> None:
    tokens = [(-1.0, -1.0, 1.0, -1.0), (-1.0, -2.0, 1.0, -1.0), (-2.0, -1.0, -1.0, -1.5)]
    _, result = terms(tokens, 0.5)
    weights = torch.tensor([0.5, 0.5, 0.25], dtype=torch.float64)
    first, second = row_metrics(result, weights, [2, 1])
    assert first.ratio_min == pytest.approx(1.0)
    assert first.ratio_max == pytest.approx(math.e)
    assert first.ratio_mean == pytest.approx((1 + math.e) / 2)
    assert first.clipped_share == 0.5
    assert second.clipped_share == 1.0
    assert second.kl == pytest.approx(math.exp(0.5) - 1.5)
    total = float((result.loss.detach() * weights).sum())
    assert first.loss_share + second.loss_share == pytest.approx(total)

"""What each objective promises: closed forms, gradients, and what masks leave out."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dora_pipe.consumers.objectives.registry import k1, k2, k3, terms_of
from dora_pipe.consumers.objectives.terms import Inputs, row_figures, row_sums
from tests.support.objectives import chosen, gradient, random_inputs, rows

few = hypothesis_settings(max_examples=20)
seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4)
CLIPPING = ("grpo", "dapo", "dr-grpo", "decoupled-ppo", "tis")


@pytest.mark.parametrize("estimate", [k1, k2, k3])
def test_gradient_of_a_kl_estimate_is_its_slope(estimate: Any) -> None:
    inputs = random_inputs(3, [5])
    assert torch.autograd.gradcheck(lambda lp: estimate(lp, inputs.reference), (inputs.logprobs,))


def test_kl_estimates_agree_in_the_mean_and_not_in_their_gradient() -> None:
    made = torch.Generator().manual_seed(1)
    logits = torch.randn(50, generator=made, dtype=torch.float64).requires_grad_()
    fixed = (logits + 0.3 * torch.randn(50, generator=made, dtype=torch.float64)).detach()
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


# Closed forms of single rules.


@given(seed=seeds, lengths=shapes)
def test_ratio_of_gspo_is_the_geometric_mean_of_the_ratios_of_its_tokens(
    seed: int, lengths: list[int]
) -> None:
    inputs = random_inputs(seed, lengths)
    found = terms_of(inputs, chosen("gspo")).ratio
    ratios = (inputs.logprobs - inputs.behaviour).detach().exp()
    for mine, part in zip(rows(inputs, found), rows(inputs, ratios), strict=True):
        expected = math.prod(part.tolist()) ** (1 / len(part))
        assert mine.tolist() == pytest.approx([expected] * len(part), rel=1e-9)


@given(seed=seeds)
def test_decoupled_ppo_without_a_clip_has_the_ratio_to_the_version_that_sampled(seed: int) -> None:
    inputs = random_inputs(seed, [4, 3], proximal=True)
    wide = {"clip_low": 1e6, "clip_high": 1e6, "weight_max": 1e6}
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
    truncated = terms_of(inputs, chosen("tis", weight_max=2.0))
    assert truncated.loss.tolist() == pytest.approx([-weights[0], -2.0, -weights[2]])
    dropped = terms_of(inputs, chosen("decoupled-ppo", weight_max=2.0))
    assert dropped.loss.tolist() == pytest.approx([-weights[0], 0.0, -weights[2]])
    assert dropped.kept is not None
    assert dropped.kept.tolist() == [True, False, True]
    whole = terms_of(inputs, chosen("tis", weight_max=100.0, level="sequence"))
    assert whole.loss.tolist() == pytest.approx([-math.prod(weights)] * 3)


def test_topr_imitates_what_was_good_whatever_its_ratio_and_tapers_what_was_bad() -> None:
    inputs = random_inputs(5, [3, 3, 3])
    far = torch.tensor([-9.0] * 3 + [-9.0] * 3 + [9.0] * 3, dtype=torch.float64)
    worth = torch.tensor([2.0] * 3 + [-2.0] * 3 + [-2.0] * 3, dtype=torch.float64)
    inputs = replace(inputs, behaviour=inputs.logprobs.detach() - far, advantages=worth)
    found = gradient(inputs, chosen("topr"))
    assert found[:3].tolist() == [-2.0] * 3
    assert found[3:6].tolist() == pytest.approx([2 * math.exp(-27.0)] * 3)
    assert found[6:].tolist() == [2.0] * 3
    clipped = terms_of(inputs, chosen("topr")).clipped
    assert clipped.tolist() == [False] * 6 + [True] * 3


def test_weighted_topr_with_weights_of_1_is_topr() -> None:
    inputs = random_inputs(6, [2, 5])
    plain, weighted = (terms_of(inputs, chosen(kind)) for kind in ("topr", "weighted-topr"))
    assert torch.equal(plain.loss, weighted.loss)


# Masks.


def test_mask_leaves_out_an_infinite_ratio_without_a_trace_in_the_gradient() -> None:
    inputs = random_inputs(2, [4])
    behaviour = inputs.behaviour.clone()
    behaviour[1] = -2000.0
    inputs = replace(inputs, behaviour=behaviour)
    assert not gradient(inputs, chosen("grpo", clip_low=1.0)).isfinite().all()
    found = gradient(inputs, chosen("grpo", mask="token"))
    assert found.isfinite().all()
    assert found[1] == 0


def test_wide_mask_changes_nothing() -> None:
    inputs = random_inputs(4, [4, 4])
    wide = chosen("grpo", mask="token", mask_low=1e-9, mask_high=1e9)
    assert torch.equal(terms_of(inputs, wide).loss, terms_of(inputs, chosen("grpo")).loss)


def test_figures_name_the_weight_and_what_was_left_out() -> None:
    settings = chosen("tis", mask="token", mask_low=0.9, mask_high=1.1)
    inputs = random_inputs(8, [4, 6], proximal=True)
    terms = terms_of(inputs, settings)
    first, _ = row_figures(terms, torch.ones(10, dtype=torch.float64), inputs.lengths)
    assert terms.kept is not None
    assert terms.weight is not None
    assert first.masked_share == pytest.approx(1 - terms.kept[:4].double().mean().item())
    assert first.weight_mean == pytest.approx(terms.weight[:4].mean().item())
    plain = row_figures(
        terms_of(inputs, chosen("grpo")), torch.ones(10, dtype=torch.float64), inputs.lengths
    )
    assert plain[0].masked_share is None
    assert plain[0].weight_mean is None


@given(seed=seeds, lengths=shapes)
def test_sums_of_trajectories_are_those_of_their_own_tokens(seed: int, lengths: list[int]) -> None:
    inputs = random_inputs(seed, lengths)
    found = rows(inputs, row_sums(inputs.behaviour, inputs.lengths))
    for mine, part in zip(found, rows(inputs, inputs.behaviour), strict=True):
        assert mine.tolist() == pytest.approx([math.fsum(part.tolist())] * len(part))


@pytest.mark.parametrize("kl", [0.0, 0.2])
def test_grpo_has_the_bits_it_had_when_it_was_alone(kl: float) -> None:
    made = torch.Generator().manual_seed(3)
    lp, old, ref, worth = (torch.randn(500, generator=made) for _ in range(4))
    ratio = (lp - old).exp()
    expected = -(ratio * worth).minimum(ratio.clamp(1.0 - 0.2, 1.0 + 0.28) * worth)
    if kl:
        expected = expected + kl * ((ref - lp).exp() - (ref - lp) - 1.0)
    inputs = Inputs(logprobs=lp, behaviour=old, advantages=worth, reference=ref, lengths=(200, 300))
    assert torch.equal(terms_of(inputs, chosen("grpo", kl=kl)).loss, expected)

"""Tests of training on several contexts: each sampled token once."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dora_pipe.consumers.learners.deepspeed.commands import shares
from dora_pipe.consumers.learners.learner import StepResult, TrainBatch
from dora_pipe.consumers.learners.settings import MICRO_BATCH_TOKENS, StepSettings, step_settings
from dora_pipe.consumers.learners.step import Pass, updates_of
from dora_pipe.consumers.objectives.registry import needs_whole, objective_kind
from dora_pipe.schemas.context_tokens import contexts_of, counted_places
from dora_pipe.store.safetensors_file import Entry, mapped, read_entries
from tests.support.batches import make_batch, with_teacher
from tests.support.contexts import branched_batch, cut_in_two, in_two_turns
from tests.support.models import make_qwen2
from tests.support.objectives import OF_TRAINER, objective_settings
from tests.support.torch_policy import Policy

EVERY: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo"},
    "grpo with a KL": {"kind": "grpo", "kl_coef": 0.3},
    "dr-grpo": {"kind": "dr-grpo"},
    "grpo, geometric mask": {"kind": "grpo", "mask": "geometric"},
    "cispo": {"kind": "cispo"},
    "gspo": {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    "tis, sequence": {"kind": "tis", "level": "sequence"},
    "decoupled-ppo, sequences masked": {"kind": "decoupled-ppo", "mask": "sequence"},
    "topr": {"kind": "topr"},
    "a teacher": {"kind": "grpo", "teacher_weight": 0.5},
}
SMALL = 40
"""Padded tokens of a pass too small for every trajectory."""


def step(
    policy: Policy, batch: TrainBatch, tokens: int = 4096, **keys: Any
) -> tuple[StepResult, Any]:
    learner = policy.trainer(micro_batch_tokens=tokens)
    result = learner.train(batch, settings(tokens, **keys))
    learner.save_optimizer(policy.root / "after")
    with mapped(policy.root / "after") as data:
        return result, _gradients(data, read_entries(policy.root / "after"))


def _gradients(data: memoryview, entries: Sequence[Entry]) -> dict[str, np.ndarray[Any, Any]]:
    return {
        entry.name: np.frombuffer(bytes(data[entry.start : entry.end]), np.float32)
        for entry in entries
        if entry.name.startswith("exp_avg/")
    }


def settings(tokens: int = 4096, updates: int = 1, **keys: Any) -> dict[str, Any]:
    kind = keys.pop("kind", "grpo")
    own = {"trainer.minibatches": updates, "trainer.max_grad_norm": 1e9}
    return {**OF_TRAINER, **own, **objective_settings(kind, **keys), MICRO_BATCH_TOKENS: tokens}


def step_of(tokens: int = 4096, **keys: Any) -> StepSettings:
    return step_settings(settings(tokens, **keys))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"), make_qwen2)


def assert_same_step(entry: tuple[StepResult, Any], other: tuple[StepResult, Any]) -> None:
    (first, gradients), (second, rest) = entry, other
    for name in first.metrics.keys() - {"padded_tokens"}:
        close = pytest.approx(second.metrics[name], rel=2e-4, abs=2e-6)
        assert first.metrics[name] == close, name
    for row, same in zip(first.contributions, second.contributions, strict=True):
        for name in row.keys() - {"micro_batch"}:
            expected = same[name]
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=2e-4, abs=2e-6)
            assert row[name] == expected, name
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    assert largest > 0
    for name, gradient in gradients.items():
        assert np.abs(gradient - rest[name]).max() < 1e-5 * largest, name


@pytest.mark.parametrize("keys", EVERY.values(), ids=EVERY)
def test_a_turn_that_stands_in_a_context_of_its_own_is_trained_as_it_was(
    policy: Policy, keys: dict[str, Any]
) -> None:
    batch = in_two_turns(make_batch(seed=3, groups=3, tokens=(6, 24)))
    if "teacher_weight" in keys:
        batch = with_teacher(batch)
    assert_same_step(step(policy, batch, **keys), step(policy, cut_in_two(batch), **keys))


@pytest.mark.parametrize("keys", EVERY.values(), ids=EVERY)
def test_contexts_that_do_not_fit_in_one_pass_are_trained_as_those_that_do(
    policy: Policy, keys: dict[str, Any]
) -> None:
    batch = branched_batch(seed=5)
    if "teacher_weight" in keys:
        batch = with_teacher(batch)
    assert_same_step(step(policy, batch, **keys), step(policy, batch, SMALL, **keys))


def plain_logprobs(policy: Policy, batch: TrainBatch) -> dict[str, torch.Tensor]:
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(policy.directory)
    results = {}
    for entry in (trajectory for group in batch.groups for trajectory in group.trajectories):
        parts = []
        for context in contexts_of(entry):
            ids = torch.tensor([context.token_ids.tolist()])
            with torch.no_grad():
                table = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), -1)
            every = table.gather(1, ids[0, 1:, None])[:, 0]
            parts.append(every[torch.from_numpy(context.loss_mask[1:] == 1)])
        results[entry.trajectory] = torch.cat(parts)
    return results


@pytest.mark.parametrize("tokens", [4096, SMALL])
def test_the_ratio_of_a_sequence_is_taken_over_all_contexts(policy: Policy, tokens: int) -> None:
    batch = branched_batch(seed=7, groups=1, samples=3)
    keys = {"kind": "gspo", "clip_low": 0.05, "clip_high": 0.05}
    result, _ = step(policy, batch, tokens, **keys)
    logprobs = plain_logprobs(policy, batch)
    trajectories = batch.groups[0].trajectories
    rewards = np.array([trajectory.reward for trajectory in trajectories])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    loss = 0.0
    for trajectory, advantage, row in zip(
        trajectories, advantages, result.contributions, strict=True
    ):
        behaviour = np.array(
            [trajectory.logprobs[position] for position in counted_places(trajectory).tolist()],
            np.float64,
        )
        ratio = math.exp(float((logprobs[trajectory.trajectory].numpy() - behaviour).mean()))
        clipped = min(ratio * advantage, min(max(ratio, 0.95), 1.05) * advantage)
        loss -= clipped / len(trajectories)
        assert row["ratio_mean"] == pytest.approx(ratio, rel=1e-4)
        assert row["ratio_min"] == row["ratio_max"]
        assert row["tokens"] == len(behaviour) == trajectory.sampled
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-4)


def _trained(passes: list[Pass]) -> Counter[tuple[str, int]]:
    counter: Counter[tuple[str, int]] = Counter()
    for unit in (unit for packed in passes for unit in packed.units):
        trajectory = unit.item.trajectory
        contexts = list(contexts_of(trajectory))
        for row, (ids, mask, _) in zip(unit.rows, unit.sequences(), strict=True):
            context = contexts[row.context]
            counted = np.flatnonzero(np.asarray(mask)[1:]) + 1
            assert len(counted) == row.counted
            assert len(ids) == row.tokens
            places = (counted - context.own + context.start).tolist()
            tokens = [trajectory.token_ids[position] for position in places]
            assert [ids[position] for position in counted.tolist()] == tokens
            counter.update((trajectory.trajectory, position) for position in places)
    return counter


@given_settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([SMALL, 100, 4096]),
    kind=st.sampled_from(["grpo", "gspo"]),
    ranks=st.integers(1, 3),
)
def test_each_sampled_token_is_trained_once_by_one_rank_in_one_update(
    seed: int, tokens: int, kind: str, ranks: int
) -> None:
    batch = branched_batch(seed=seed)
    step = step_of(tokens, kind=kind, updates=2)
    items, updates = updates_of(batch, step)
    together = [packed for passes in updates for packed in passes]
    expected = Counter(
        (item.trajectory.trajectory, int(position))
        for item in items
        if item.advantage
        for position in counted_places(item.trajectory)
    )
    assert _trained(together) == expected
    for passes in updates:
        shared = [entry for own in shares(passes, ranks=ranks) for entry in own]
        assert _trained(shared) == _trained(passes)
    of_update = [{unit.item.trajectory.trajectory for p in u for unit in p.units} for u in updates]
    assert not of_update[0] & of_update[1]


@given(seed=st.integers(0, 1000), tokens=st.sampled_from([SMALL, 100, 4096]))
def test_no_part_of_a_pass_is_larger_than_it_may_be(seed: int, tokens: int) -> None:
    for kind in ("grpo", "gspo"):
        _, updates = updates_of(branched_batch(seed=seed), step_of(tokens, kind=kind))
        for entry in (packed for passes in updates for packed in passes):
            assert all(part.padded_tokens <= tokens or part.rows == 1 for part in entry.parts)
            assert len(entry.parts) == 1 or len(entry.units) == 1
            assert sum(part.rows for part in entry.parts) == sum(len(of.rows) for of in entry.units)


def test_an_objective_of_ones_own_gets_whole_trajectories_unless_it_says_otherwise(
    tmp_path: Path,
) -> None:
    text = "from dora_pipe.consumers.objectives.registry import ObjectiveKind\n"
    text += "WHOLE = ObjectiveKind(terms=print)\n"
    (tmp_path / "both_ways.py").write_text(
        text + "APART = ObjectiveKind(terms=print, per_token=True)\n"
    )
    for name, full in (("WHOLE", True), ("APART", False)):
        objective_kind(f"both_ways:{name}", str(tmp_path))
        keys = step_of(kind=f"both_ways:{name}").objective
        assert needs_whole(keys) == full
        assert needs_whole(msgspec.structs.replace(keys, mask="geometric"))


def test_what_a_teacher_says_goes_to_the_token_that_it_is_said_of() -> None:
    batch = with_teacher(branched_batch(seed=2))
    assert batch.teacher is not None
    for kind in ("grpo", "gspo"):
        step = step_of(SMALL, kind=kind, teacher_weight=0.5)
        _, updates = updates_of(batch, step)
        for unit in (unit for passes in updates for packed in passes for unit in packed.units):
            trajectory = unit.item.trajectory
            column = dict(
                zip(
                    counted_places(trajectory).tolist(),
                    batch.teacher[trajectory.trajectory],
                    strict=True,
                )
            )
            contexts = list(contexts_of(trajectory))
            texts = [
                column[position - contexts[row.context].own + contexts[row.context].start]
                for row, (_, mask, _) in zip(unit.rows, unit.sequences(), strict=True)
                for position in (np.flatnonzero(np.asarray(mask)[1:]) + 1).tolist()
            ]
            assert list(unit.teacher or ()) == texts

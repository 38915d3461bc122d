"""Policies that DeepSpeed publishes in bfloat16: torch's trainer's steps, checkpoints, bits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.safetensors_file import read_entries
from tests.deepspeed.conftest import Bench
from tests.deepspeed.test_arithmetic import HARD, assert_same_steps, three_batches
from tests.support import deepspeed
from tests.support.batches import SETTINGS, make_batch
from tests.support.deepspeed import ENGINES

SMALL = {**SETTINGS, "trainer.learning_rate": 1e-5}
"""Most updates are smaller than half a unit of bfloat16's last place."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    deepspeed.need_deepspeed()
    yield Bench(tmp_path_factory.mktemp("bfloat16"), dtype="bfloat16")


def saved(trainer: Any, folder: Path, name: str) -> tuple[Manifest, bytes]:
    """Weights and checkpoint, written under this name."""
    manifest = trainer.save_weights(folder / f"{name}.weights")
    trainer.save_optimizer(folder / f"{name}.state")
    return manifest, (folder / f"{name}.state").read_bytes()


@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_steps_are_those_of_the_torch_trainer_and_small_ones_add_up_in_the_masters(
    narrow: Bench, options: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = narrow.deepspeed(**options), narrow.torch()
    assert ours.manifest() == narrow.policy
    found = [ours.train(batch, SMALL) for batch in three_batches()]
    assert_same_steps(found, [theirs.train(batch, SMALL) for batch in three_batches()])
    saved(ours, tmp_path, "ours")
    saved(theirs, tmp_path, "theirs")
    expected = masters(tmp_path, "theirs")
    for name, master in masters(tmp_path, "ours").items():
        assert float((master - expected[name]).abs().max()) < 3e-6, name
    assert {one.dtype for one in read_entries(tmp_path / "ours.weights")} == {"BF16"}
    assert ours.numerics()["policies"] == "bfloat16"


def masters(folder: Path, name: str) -> dict[str, Any]:
    """Weights and what a checkpoint has beyond them, put together."""
    import torch

    from dora_pipe.consumers.learners.torch.model import read_tensor
    from dora_pipe.store.safetensors_file import mapped

    weights, state = folder / f"{name}.weights", folder / f"{name}.state"
    kept = {one.name: one for one in read_entries(state)}
    found = {}
    with mapped(weights) as numbers, mapped(state) as beyond:
        for entry in read_entries(weights):
            bits = read_tensor(numbers, entry).float().view(torch.int32)
            remainder = read_tensor(beyond, kept[f"remainder/{entry.name}"])
            found[entry.name] = (bits + remainder).view(torch.float32)
    return found


@pytest.mark.parametrize("options", [*ENGINES, {"zero_stage": 2, "dtype": "bfloat16"}], ids=str)
def test_checkpoint_is_gone_on_with_bit_for_bit_and_a_copy_comes_back(
    narrow: Bench, options: dict[str, Any], tmp_path: Path
) -> None:
    settings, (first, second, other) = {**HARD, "trainer.learning_rate": 1e-5}, three_batches()
    ours = narrow.deepspeed(**options)
    ours.train(first, settings)
    manifest, state = saved(ours, tmp_path, "first")
    # Updates ahead of another batch, which are taken back.
    for part in replace(other, parts=[1, 1]).in_parts()[:2]:
        ours.train_part(part, settings)
    assert saved(ours, tmp_path, "again") == (manifest, state)
    ours.train(second, settings)
    again = narrow.deepspeed(**options)
    again.load(
        tmp_path / "first.weights", digest=manifest.digest, optimizer=tmp_path / "first.state"
    )
    assert saved(again, tmp_path, "again") == (manifest, state)
    again.train(second, settings)
    assert saved(again, tmp_path, "again") == saved(ours, tmp_path, "ours")


def test_remainders_that_are_not_of_the_weights_count_as_none(
    narrow: Bench, tmp_path: Path
) -> None:
    trainer = narrow.deepspeed()
    trainer.train(make_batch(seed=1), SETTINGS)
    _, state = saved(trainer, tmp_path, "first")
    trainer.load(narrow.weights, digest=narrow.policy.digest, optimizer=tmp_path / "first.state")
    assert trainer.manifest() == narrow.policy
    assert saved(trainer, tmp_path, "other")[1] != state
    with pytest.raises(PolicyError, match="of another type than version 0"):
        bench = Bench(tmp_path / "float32")
        trainer.load(bench.weights, digest=bench.policy.digest, optimizer=None)


def test_adapter_on_a_base_in_bfloat16_is_refused(narrow: Bench) -> None:
    from dora_pipe.consumers.learners.torch.lora import LoraOptions

    with pytest.raises(PolicyError, match="an adapter and its base are float32"):
        narrow.deepspeed(lora=LoraOptions(rank=2, alpha=4.0, targets=("q_proj",)))

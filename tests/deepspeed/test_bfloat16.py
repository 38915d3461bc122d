"""Policies that DeepSpeed publishes in bfloat16: torch's trainer's steps, checkpoints, bits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.model import LINEAR_LAYERS
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.adapters import stands_on
from dora_pipe.store.safetensors_file import read_entries
from tests.deepspeed.conftest import Bench
from tests.deepspeed.test_arithmetic import HARD, assert_same_steps, three_batches
from tests.support import deepspeed
from tests.support.batches import SETTINGS
from tests.support.deepspeed import ENGINES

SMALL = {**SETTINGS, "trainer.learning_rate": 1e-5}
"""Most updates are smaller than half a unit of bfloat16's last place."""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    deepspeed.need_deepspeed()
    yield Bench(tmp_path_factory.mktemp("bfloat16"), dtype="bfloat16")


def saved(trainer: Any, folder: Path, name: str) -> tuple[Manifest, bytes]:
    manifest = trainer.save_weights(folder / f"{name}.weights")
    trainer.save_optimizer(folder / f"{name}.state")
    return manifest, (folder / f"{name}.state").read_bytes()


@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_steps_are_those_of_the_torch_trainer_and_small_ones_add_up_in_the_masters(
    narrow: Bench, options: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = narrow.deepspeed(**options), narrow.torch()
    assert ours.manifest() == narrow.policy
    results = [ours.train(batch, SMALL) for batch in three_batches()]
    assert_same_steps(results, [theirs.train(batch, SMALL) for batch in three_batches()])
    saved(ours, tmp_path, "ours")
    saved(theirs, tmp_path, "theirs")
    expected = masters(tmp_path, "theirs")
    for name, master in masters(tmp_path, "ours").items():
        assert float((master - expected[name]).abs().max()) < 3e-6, name
    assert {entry.dtype for entry in read_entries(tmp_path / "ours.weights")} == {"BF16"}
    assert ours.numerics()["policies"] == "bfloat16"


def masters(folder: Path, name: str) -> dict[str, Any]:
    import torch

    from dora_pipe.consumers.learners.torch.model import read_tensor
    from dora_pipe.store.safetensors_file import mapped

    weights, state = folder / f"{name}.weights", folder / f"{name}.state"
    kept = {entry.name: entry for entry in read_entries(state)}
    results = {}
    with mapped(weights) as numbers, mapped(state) as beyond:
        for entry in read_entries(weights):
            if entry.dtype != "BF16":  # An adapter says on which base it stands.
                continue
            bits = read_tensor(numbers, entry).float().view(torch.int32)
            remainder = read_tensor(beyond, kept[f"remainder/{entry.name}"])
            results[entry.name] = (bits + remainder).view(torch.float32)
    return results


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


def _adapter() -> Any:
    from dora_pipe.consumers.learners.torch.lora import LoraOptions

    return LoraOptions(rank=4, alpha=8.0, targets=LINEAR_LAYERS)


ADAPTED = [
    *({"zero_stage": stage} for stage in range(4)),
    {"zero_stage": 2, "offload": "optimizer"},
    {"zero_stage": 3, "offload": "all"},
]


@pytest.mark.parametrize("options", ADAPTED, ids=str)
def test_steps_of_an_adapter_are_those_of_the_torch_trainer(
    narrow: Bench, options: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = narrow.deepspeed(lora=_adapter(), **options), narrow.torch(lora=_adapter())
    assert ours.manifest() == narrow.policy
    results = [ours.train(batch, SMALL) for batch in three_batches()]
    assert_same_steps(results, [theirs.train(batch, SMALL) for batch in three_batches()])
    manifest, _ = saved(ours, tmp_path, "ours")
    saved(theirs, tmp_path, "theirs")
    assert manifest.dtype == "bfloat16" and stands_on(manifest, narrow.policy.digest)
    expected = masters(tmp_path, "theirs")
    for name, master in masters(tmp_path, "ours").items():
        assert float((master - expected[name]).abs().max()) < 3e-6, name


@pytest.mark.parametrize(
    "options",
    [*ADAPTED, {"zero_stage": 2, "dtype": "bfloat16"}, {"zero_stage": 3, "dtype": "bfloat16"}],
    ids=str,
)
def test_checkpoint_of_an_adapter_is_gone_on_with_bit_for_bit(
    narrow: Bench, options: dict[str, Any], tmp_path: Path
) -> None:
    settings, (first, second, other) = {**HARD, "trainer.learning_rate": 1e-5}, three_batches()
    ours = narrow.deepspeed(lora=_adapter(), **options)
    ours.train(first, settings)
    manifest, state = saved(ours, tmp_path, "first")
    for part in replace(other, parts=[1, 1]).in_parts()[:2]:
        ours.train_part(part, settings)
    assert saved(ours, tmp_path, "again") == (manifest, state)
    ours.train(second, settings)
    again = narrow.deepspeed(lora=_adapter(), **options)
    again.load(
        tmp_path / "first.weights", digest=manifest.digest, optimizer=tmp_path / "first.state"
    )
    assert saved(again, tmp_path, "again") == (manifest, state)
    again.train(second, settings)
    assert saved(again, tmp_path, "again") == saved(ours, tmp_path, "ours")

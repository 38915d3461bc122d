"""A run with another optimizer than AdamW and every bound on the memory of a step: its trainer is
killed and the steps come out bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.consumers.learners.torch import memory
from tests.integration.test_objective_runs import again, commits_of
from tests.support.cluster import Cluster, TorchParts, make_config
from tests.support.models import make_qwen2

STEPS = 3
CHUNKS = {"head_chunk_tokens", "mlp_chunk_tokens"}


@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_run_with_it_comes_out_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="make test-adamw8bit")
    for name in ("HEAD_ELEMENTS", "MLP_ELEMENTS", "MLP_ELEMENTS_MIN"):
        monkeypatch.setattr(memory, name, 2**10)
    config = make_config(
        run__steps=STEPS,
        run__name=optimizer,
        sampling__max_tokens=8,
        rollout__prompts_per_step=2,
        objective__kl_coef=0.1,
        trainer__optimizer=optimizer,
        trainer__weight_decay=0.1,
        trainer__schedule="linear",
        trainer__batch_parts=2,
        trainer__minibatches=2,
        trainer__checkpoint_every=2,
        trainer__packing=True,
        trainer__gradient_checkpointing=True,
        policies__dtype="bfloat16",
    )
    model = make_qwen2(tmp_path / "model", hidden_size=32, intermediate_size=128)
    parts = TorchParts(model, dtype="bfloat16")
    with Cluster(tmp_path / "run", config, parts=parts, workers=("w0",)) as running:
        running.until(lambda: running.version >= 2)
        running.restart("trainer")
        running.run()
        report = audit(running.bus, running.topics, running.store.root)
        assert report.holds, [violation.line for violation in report.violations]
        numerics = [commit.numerics for commit in commits_of(running)]
        assert {numeric["policies"] for numeric in numerics} == {"bfloat16"}
        assert {numeric["packing"] for numeric in numerics} == {"on"}
        assert all(numeric.keys() >= CHUNKS for numeric in numerics)
        assert {numeric["optimizer"].partition(" ")[0] for numeric in numerics} == {optimizer}
        lines = again(running, last=STEPS)
        assert [line.replayed.equal for line in lines] == [True] * STEPS

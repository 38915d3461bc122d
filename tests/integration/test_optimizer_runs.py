"""A run with another optimizer than AdamW: killed, resumed, replayed, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from tests.integration.test_objective_runs import again, commits_of
from tests.support.cluster import Cluster, TorchParts, make_config
from tests.support.models import make_qwen2

STEPS = 3


@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_run_with_it_comes_out_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes", reason="make test-adamw8bit")
    config = make_config(
        run__steps=STEPS,
        run__name=optimizer,
        sampling__max_tokens=8,
        trainer__optimizer=optimizer,
        trainer__weight_decay=0.1,
        trainer__schedule="linear",
        trainer__batch_parts=2,
        trainer__minibatches=2,
        trainer__checkpoint_every=2,
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
        assert {numeric["optimizer"].partition(" ")[0] for numeric in numerics} == {optimizer}
        lines = again(running, last=STEPS)
        assert [line.replayed.equal for line in lines] == [True] * STEPS

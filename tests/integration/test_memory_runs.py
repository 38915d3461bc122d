"""A run with all that bounds the memory of a step: it holds, and its steps come out bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.consumers.learners.torch import memory
from tests.integration.test_objective_runs import again, commits_of
from tests.support.cluster import Cluster, TorchParts, make_config
from tests.support.models import make_qwen2

STEPS = 3


def test_run_with_little_memory_comes_out_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEAD_ELEMENTS", "MLP_ELEMENTS", "MLP_ELEMENTS_MIN"):
        monkeypatch.setattr(memory, name, 2**10)
    config = make_config(
        run__steps=STEPS,
        run__name="little",
        sampling__max_tokens=24,
        objective__kl_coef=0.1,
        trainer__minibatches=2,
        trainer__checkpoint_every=2,
        trainer__packing=True,
        trainer__gradient_checkpointing=True,
    )
    parts = TorchParts(make_qwen2(tmp_path / "model"))
    with Cluster(tmp_path / "run", config, parts=parts, workers=("w0",)) as running:
        running.until(lambda: running.version >= 1)
        running.restart("trainer")
        running.run()
        report = audit(running.bus, running.topics, running.store.root)
        assert report.holds, [violation.line for violation in report.violations]
        numerics = [commit.numerics for commit in commits_of(running)]
        assert {numeric["packing"] for numeric in numerics} == {"on"}
        assert all(
            "head_chunk_tokens" in numeric and "mlp_chunk_tokens" in numeric for numeric in numerics
        )
        lines = again(running, last=STEPS)
        assert [line.replayed.equal for line in lines] == [True] * STEPS

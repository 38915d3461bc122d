"""Tests of LoRA by the command line: run, stop, audit, replay, export, resume."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.schemas.control import RunStarted, StepCommitted, WorkerJoined, WorkerReady
from dora_pipe.store.adapters import CONFIG, FOLDER
from tests.support.user_run import WAIT_S, assert_clean, call, facts, furnish, start, steps, until

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

LORA = ["-o", "lora.rank=4", "-o", "trainer.learning_rate=1e-2"]


def test_lora_run_is_audited_replayed_exported_and_begun_from(tmp_path: Path) -> None:
    directory = furnish(tmp_path)
    words = [*LORA, "-o", "policies.dtype=bfloat16", "-o", "run.steps=8"]
    running = start(directory, "run", "config.toml", *words)
    until(lambda: b"step    2 " in (directory / "said").read_bytes())
    running.send_signal(signal.SIGINT)
    assert running.wait(WAIT_S) == 130
    resumed = call(directory, "run", "config.toml", *words, "--resume")
    assert resumed == 0, (directory / "said").read_text()
    assert steps(directory, "tiny") == list(range(8))
    assert_clean(directory, "tiny")
    actual_facts = list(facts(directory, "tiny"))
    assert {
        event.max_resident_versions for event in actual_facts if isinstance(event, WorkerJoined)
    } == {4}
    ready = {event.version for event in actual_facts if isinstance(event, WorkerReady)}
    assert len(ready) > 4
    # A step that had no gradient at the start has no adapter either: its policy is the base.
    (base_bytes,) = {event.policy.bytes for event in actual_facts if isinstance(event, RunStarted)}
    sizes = {event.policy.bytes for event in actual_facts if isinstance(event, StepCommitted)} - {
        base_bytes
    }
    assert {event.policy.dtype for event in actual_facts if isinstance(event, StepCommitted)} == {
        "bfloat16"
    }
    assert len(sizes) == 1, "every adapter is as large as the others"
    assert call(directory, "replay", "tiny") == 0, (directory / "said").read_text()
    assert call(directory, "replay", "tiny", "--random", "12") == 0, (
        directory / "said"
    ).read_text()

    assert call(directory, "export", "policy", "tiny", "8", "trained") == 0
    assert call(directory, "export", "policy", "tiny", "0", "first") == 0
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(directory / "first")
    trained: Any = AutoModelForCausalLM.from_pretrained(directory / "trained")
    differing = {
        name.rpartition(".")[0].rpartition(".")[2]
        for name, tensor in base.state_dict().items()
        if not tensor.equal(trained.state_dict()[name])
    }
    assert differing == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    assert json.loads((directory / "trained" / FOLDER / CONFIG).read_text())["r"] == 4

    went_on = call(directory, "run", "config.toml", "-o", "run.name=next", "--from", "tiny@8")
    assert went_on == 0, (directory / "said").read_text()
    assert_clean(directory, "next")

"""Runs whose workers have vLLM, or one of them: real processes, real logs. `make test-vllm`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dora_pipe.cli.rundir import opened
from dora_pipe.history.audit import audit
from dora_pipe.schemas.control import WorkerJoined
from tests.support.models import make_llama_gqa
from tests.support.user_run import assert_clean, facts, furnish, start, steps
from tests.support.vllm_engines import need_vllm

pytestmark = pytest.mark.slow


WAIT_S = 600.0
"""Importing vLLM takes a quarter of a minute of CPU, in a process of each engine."""


def call(place: Path, *words: str) -> int:
    """Exit code of a command in the user's folder."""
    return start(place, *words).wait(WAIT_S)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A user's folder with a tied, grouped-query Llama whose heads vLLM has kernels for."""
    need_vllm()
    furnish(tmp_path)
    shutil.rmtree(tmp_path / "model")
    make_llama_gqa(tmp_path / "model", hidden_size=192)
    return tmp_path


def test_run_mixes_a_vllm_and_a_torch_worker_and_audit_names_the_engines(place: Path) -> None:
    words = ("-o", 'workers.engines=["vllm", "torch"]', "-o", "run.steps=6", "-o", "groups.size=8")
    assert call(place, "run", "config.toml", *words) == 0, (place / "said").read_text()
    assert steps(place, "tiny") == list(range(6))
    assert_clean(place, "tiny")
    joined = {
        one.worker: one.engine for one in facts(place, "tiny") if isinstance(one, WorkerJoined)
    }
    assert joined == {"w0": "vllm", "w1": "torch"}
    with opened("tiny", place / "runs") as run:
        report = audit(run.bus, run.topics, run.store)
    by_engine = {one.engine: one.trajectories for one in report.engines}
    assert min(by_engine[name] for name in ("vllm", "torch")) > 0
    assert sum(by_engine.values()) == report.standings["bound"]
    assert call(place, "audit", "tiny") == 0
    assert "vllm 0." in (place / "said").read_text()
    assert call(place, "replay", "tiny") == 0, (place / "said").read_text()


def test_model_without_kernels_stops_the_run_with_one_line(place: Path) -> None:
    shutil.rmtree(place / "model")
    make_llama_gqa(place / "model")  # heads of 24
    assert call(place, "run", "config.toml", "-o", "workers.engine=vllm") == 9
    said = (place / "said").read_text()
    assert "vLLM does not take the model" in said and "heads of 24" in said

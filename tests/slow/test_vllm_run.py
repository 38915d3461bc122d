"""Runs whose workers have vLLM, or one of them: real processes, real logs. `make test-vllm`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.control import RequestReleased, WorkerJoined, WorkerReady
from dora_pipe.store.safetensors_file import read_manifest
from tests.support.agent_run import versions_at_once
from tests.support.device import DTYPE, LORA_DTYPE, MODEL_DISTANCE, need_cpu
from tests.support.models import make_llama_gqa
from tests.support.moving_run import DRAINED, WORDS, drain, of, samples, trajectories
from tests.support.user_run import assert_clean, facts, start, steps, until
from tests.support.vllm_engines import BUILDERS
from tests.support.vllm_runs import WAIT_S, check_agents_run, furnished, joined, until_joined

pytestmark = pytest.mark.slow

NUMERICS_MAX = MODEL_DISTANCE[LORA_DTYPE]
"""Nats between the trainer's log-probs and vLLM's of the same weights."""

ROUTED_MAX = {"float32": 1e-5, "bfloat16": MODEL_DISTANCE["bfloat16"]}
"""The same where tokens go through the same experts."""


def call(place: Path, *words: str) -> int:
    """Exit code of a command in the user's folder."""
    return start(place, *words).wait(WAIT_S)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A user's folder with a model that vLLM takes."""
    return furnished(tmp_path)


def test_run_mixes_a_vllm_and_a_torch_worker_and_audit_names_the_engines(place: Path) -> None:
    words = ("config.toml", "-o", "run.steps=6", "-o", "groups.size=8")
    running = [start(place, "orchestrator", *words)]
    until(lambda: (place / "runs" / "tiny" / "log.sqlite").exists(), WAIT_S)
    for name, engine in (("a", "vllm"), ("b", "torch")):
        running.append(start(place, "worker", *words, "--name", name, "--engine", engine))
        until_joined(place, {name: running[-1]})
    running.append(start(place, "trainer", *words))
    said = place / "said"
    assert [one.wait(WAIT_S) for one in running] == [0] * len(running), said.read_text()
    assert joined(place) == {"a": "vllm", "b": "torch"}
    assert steps(place, "tiny") == list(range(6))
    assert_clean(place, "tiny")
    with opened("tiny", place / "runs") as run:
        report = audit(run.bus, run.topics, run.store)
    by_engine = {one.engine: one.trajectories for one in report.engines}
    assert min(by_engine[name] for name in ("vllm", "torch")) > 0
    assert sum(by_engine.values()) == report.standings["bound"]
    assert call(place, "audit", "tiny") == 0
    assert "vllm 0." in said.read_text()
    assert call(place, "replay", "tiny") == 0, said.read_text()


@pytest.mark.parametrize("there", ["vllm", "torch"])
def test_requests_of_a_drained_vllm_worker_go_on_with_their_cache_where_it_fits(
    place: Path, there: str
) -> None:
    words = ("config.toml", *WORDS, "-o", "workers.slots=16")
    running = [start(place, "orchestrator", *words)]
    until(lambda: (place / "runs" / "tiny" / "log.sqlite").exists(), WAIT_S)
    for name, engine in (("w0", there), (DRAINED, "vllm")):
        running.append(start(place, "worker", *words, "--name", name, "--engine", engine))
    until_joined(place, dict(zip(("w0", DRAINED), running[1:], strict=True)))
    running.append(start(place, "trainer", *words))
    until(lambda: samples(place), WAIT_S)
    drain(place)
    assert [one.wait(WAIT_S) for one in running] == [0] * len(running), (place / "said").read_text()
    assert_clean(place, "tiny")
    assert joined(place) == {"w0": there, DRAINED: "vllm"}
    released = [one for one in of(place, RequestReleased) if one.worker == DRAINED]
    found = trajectories(place)
    gone = [found[one.trajectory] for one in released if one.kv is not None]
    assert gone, released
    for one in gone:
        first, second = (part for part in one.segments if part.kind == "model")
        assert (first.worker, second.worker) == (DRAINED, "w0")
        if there == "vllm":
            assert one.meta.moves == 1 and second.start not in one.meta.prefills
        else:
            assert one.meta.moves == 0 and second.start in one.meta.prefills


def test_vllm_worker_of_run_is_forked_ready_and_the_run_ends_audited(place: Path) -> None:
    words = ("-o", "workers.count=1", "-o", "workers.engine=vllm")
    assert call(place, "run", "config.toml", *words) == 0, (place / "said").read_text()
    assert joined(place) == {"w0": "vllm"}
    assert steps(place, "tiny") == [0, 1, 2]
    assert_clean(place, "tiny")


def test_elastic_vllm_worker_sleeps_for_every_step_and_the_audit_is_clean(place: Path) -> None:
    words = ("-o", "workers.count=2", "-o", "workers.elastic=1", "-o", "workers.engine=vllm")
    assert call(place, "run", "config.toml", *words) == 0, (place / "said").read_text()
    assert steps(place, "tiny") == [0, 1, 2]
    assert_clean(place, "tiny")
    assert {one.worker: one.elastic for one in of(place, WorkerJoined)} == {"w0": False, "w1": True}
    slept = [one for one in of(place, WorkerReady) if one.worker == "w1" and one.version < 0]
    assert slept and call(place, "replay", "tiny") == 0, (place / "said").read_text()


def test_lora_run_has_one_vllm_worker_that_hosts_every_version(place: Path) -> None:
    vllm = ("-o", "workers.engine=vllm", "-o", f"workers.vllm.dtype={LORA_DTYPE}")
    words = ("-o", "workers.count=1", *vllm, "-o", "run.steps=6")
    lora = ("-o", "lora.rank=4", "-o", "trainer.learning_rate=1e-2", "-o", "groups.size=8")
    assert call(place, "run", "config.toml", *words, *lora) == 0, (place / "said").read_text()
    assert joined(place) == {"w0": "vllm"}
    assert steps(place, "tiny") == list(range(6))
    assert_clean(place, "tiny")
    found = list(facts(place, "tiny"))
    assert {one.versions_resident for one in found if isinstance(one, WorkerJoined)} == {4}
    assert len({one.version for one in found if isinstance(one, WorkerReady)}) > 4
    assert call(place, "replay", "tiny") == 0, (place / "said").read_text()
    assert numerics(place) < NUMERICS_MAX


def test_agents_on_vllm_are_logged_token_by_token_and_made_again(place: Path) -> None:
    vllm = ("-o", "workers.engine=vllm")
    check_agents_run(place, *vllm, steps_made=2, numerics_max=NUMERICS_MAX)
    assert joined(place) == {"w0": "vllm"}


def test_agents_of_several_lora_versions_are_beside_each_other_on_vllm(place: Path) -> None:
    vllm = ("-o", "workers.engine=vllm", "-o", f"workers.vllm.dtype={LORA_DTYPE}")
    lora = ("-o", "lora.rank=4", "-o", "trainer.learning_rate=1e-2")
    check_agents_run(place, *vllm, *lora, steps_made=4, numerics_max=NUMERICS_MAX)
    assert versions_at_once(place) > 1


@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_mixture_on_vllm_is_trained_by_its_experts_made_again_and_exported(
    place: Path, engine: str
) -> None:
    shutil.rmtree(place / "model")
    BUILDERS["qwen3_moe"](place / "model", scale=1.0)  # so that answers of a group differ
    vllm = ("-o", f"workers.engine={engine}", "-o", "sampling.routes=true")
    words = ("-o", "workers.count=1", "-o", "groups.size=8", *vllm)
    for command in (
        ("run", "config.toml", *words),
        ("audit", "tiny"),
        ("replay", "tiny"),
        ("export", "policy", "tiny", "3", "out"),
    ):
        assert call(place, *command) == 0, (place / "said").read_text()
    assert steps(place, "tiny") == [0, 1, 2]
    assert_clean(place, "tiny")
    again = read_manifest(place / "out" / "model.safetensors").digest
    assert again != read_manifest(place / "model" / "model.safetensors").digest
    trained = [one for one in trajectories(place).values() if one.meta.purpose == "train"]
    assert trained and all(one.routed_experts is not None for one in trained)
    assert numerics(place) < ROUTED_MAX[DTYPE]


def numerics(place: Path) -> float:
    """The largest distance of the trainer's log-probs from vLLM's under equal weights."""
    (place / "said").unlink()
    assert call(place, "mismatch", "tiny", "--json") == 0
    lines = (place / "said").read_text().splitlines()
    (measured,) = (json.loads(line) for line in lines if line.startswith("{"))
    return float(measured["causes"]["numerics"]["largest"])


def test_model_without_kernels_stops_the_run_with_one_line(place: Path) -> None:
    need_cpu()
    shutil.rmtree(place / "model")
    make_llama_gqa(place / "model")  # heads of 24
    assert call(place, "run", "config.toml", "-o", "workers.engine=vllm") == 9
    said = (place / "said").read_text()
    assert "vLLM does not take the model" in said and "heads of 24" in said

"""Runs whose workers have vLLM, or one of them, whose server may be killed. `make test-vllm`."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.launch.run_dir import opened
from dora_pipe.producers.engines.vllm.core import VllmSettings
from dora_pipe.producers.engines.vllm.process import PROGRAM, ServerProcess
from dora_pipe.producers.engines.vllm.serve import KEY_VARIABLE
from dora_pipe.schemas.control import RequestReleased, WorkerJoined, WorkerReady
from dora_pipe.store.safetensors_file import read_manifest
from tests.support.agent_run import versions_at_once
from tests.support.device import DTYPE, LORA_DTYPE, MODEL_DISTANCE, need_cpu
from tests.support.models import make_llama_gqa
from tests.support.moving_run import DRAINED, WORDS, drain, of, samples, trajectories
from tests.support.user_run import assert_clean, facts, start, steps, until
from tests.support.vllm_runs import WAIT_S, check_agents_run, furnished, joined, until_joined
from tests.support.vllm_servers import BUILDERS, family

pytestmark = pytest.mark.slow

STEPS = 24

NUMERICS_MAX = MODEL_DISTANCE[LORA_DTYPE]
"""Nats between the trainer's log-probs and vLLM's of the same weights."""

ROUTED_MAX = {"float32": 1e-5, "bfloat16": MODEL_DISTANCE["bfloat16"]}
"""The same where tokens go through the same experts."""


def call(path: Path, *words: str) -> int:
    """Exit code of a command in the user's folder."""
    return start(path, *words).wait(WAIT_S)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A user's folder with a model that vLLM takes."""
    return furnished(tmp_path)


def _server_of(worker: int) -> int:
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    for child in map(int, children):
        if PROGRAM.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise AssertionError(f"{worker} has no server among {children}")


def _key_of(server: int) -> str:
    expected = f"{KEY_VARIABLE}=".encode()
    lines = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    (key,) = (line.removeprefix(expected) for line in lines if line.startswith(expected))
    return key.decode()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_outlives_a_vllm_server_and_audit_names_who_generated_what(
    place: Path, ranks: int
) -> None:
    words = ["config.toml", "-o", f"run.steps={STEPS}", "-o", "rollout.group_size=8"]
    words += ["-o", f"workers.vllm.tensor_parallel_size={ranks}"]
    orchestrator = start(place, "orchestrator", *words)
    until(lambda: (place / "runs" / "tiny" / "log.sqlite").exists(), WAIT_S)
    served = start(place, "worker", *words, "--name", "a", "--engine", "vllm")
    until_joined(place, {"a": served})
    other = start(place, "worker", *words, "--name", "b")
    until_joined(place, {"b": other})
    trainer = start(place, "trainer", *words)
    output = place / "said"
    until(lambda: len(steps(place, "tiny")) >= 3, WAIT_S)
    server = _server_of(served.pid)
    key = _key_of(server)
    processes = family(server)
    assert len(processes) >= 1 + ranks
    os.kill(server, signal.SIGKILL)
    assert served.wait(WAIT_S) == 7, output.read_text()
    assert not any(_alive(pid) for pid in processes)
    ends = [process.wait(WAIT_S) for process in (orchestrator, other, trainer)]
    assert ends == [0, 0, 0], output.read_text()
    assert "vLLM's server ended by SIGKILL" in output.read_text()
    assert steps(place, "tiny") == list(range(STEPS))
    assert_clean(place, "tiny")
    assert start(place, "audit", "tiny").wait(WAIT_S) == 0
    assert "vllm 0." in output.read_text()
    with opened("tiny", place / "runs") as run:
        report = audit(run.bus, run.topics, run.store)
    by_engine = {engine.engine: engine.trajectories for engine in report.engines}
    assert min(by_engine[name] for name in ("vllm", "torch")) > 0
    assert sum(by_engine.values()) == report.standings["bound"]
    assert len(key) > 32
    for file in place.rglob("*"):
        assert not file.is_file() or key.encode() not in file.read_bytes(), file


def test_requests_move_with_their_caches_between_servers_of_two_ranks_and_outlive_one(
    place: Path,
) -> None:
    """A worker is drained; then the server that took what it had is killed."""
    words = (
        "config.toml",
        *WORDS,
        "-o",
        "workers.max_num_seqs=16",
        "-o",
        "workers.vllm.tensor_parallel_size=2",
    )
    orchestrator = start(place, "orchestrator", *words)
    until(lambda: (place / "runs" / "tiny" / "log.sqlite").exists(), WAIT_S)
    served = [
        start(place, "worker", *words, "--name", name, "--engine", "vllm")
        for name in ("w0", DRAINED)
    ]
    until_joined(place, dict(zip(("w0", DRAINED), served, strict=True)))
    trainer = start(place, "trainer", *words)
    until(lambda: samples(place), WAIT_S)
    drain(place)
    until(
        lambda: any(trajectory.meta.migrations for trajectory in trajectories(place).values()),
        WAIT_S,
    )
    os.kill(_server_of(served[0].pid), signal.SIGKILL)
    output = place / "said"
    assert served[0].wait(WAIT_S) == 7, output.read_text()
    late = start(place, "worker", *words, "--name", "late", "--engine", "torch")
    ends = [process.wait(WAIT_S) for process in (orchestrator, served[1], late, trainer)]
    assert ends == [0] * 4, output.read_text()
    assert_clean(place, "tiny")
    released = {
        release.trajectory for release in of(place, RequestReleased) if release.kv is not None
    }
    moved = [
        trajectory for trajectory in trajectories(place).values() if trajectory.meta.migrations
    ]
    assert moved and {entry.trajectory for entry in moved} <= released
    for trajectory in moved:
        first, second = [part for part in trajectory.segments if part.kind == "model"][:2]
        assert (first.worker, second.worker) == (DRAINED, "w0")
        assert second.start not in trajectory.meta.prefills


def test_worker_of_a_run_takes_the_vllm_server_at_its_address(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerProcess.start(
        place / "model", VllmSettings(), slots=8, context_tokens=64, threads=1
    )
    try:
        monkeypatch.setenv(KEY_VARIABLE, server.address.key)
        words = ("-o", "workers.count=1", "-o", "workers.engine=vllm")
        address = ("-o", f'workers.vllm.addresses=["{server.address}"]')
        run = start(place, "run", "config.toml", *words, *address)
        assert run.wait(WAIT_S) == 0, (place / "said").read_text()
        server.check()
    finally:
        server.close()
    assert joined(place) == {"w0": "vllm"}
    assert steps(place, "tiny") == [0, 1, 2]
    assert_clean(place, "tiny")


def test_requests_of_a_drained_vllm_worker_are_prefilled_by_another_engine(place: Path) -> None:
    words = ("config.toml", *WORDS, "-o", "workers.max_num_seqs=16")
    running = [start(place, "orchestrator", *words)]
    until(lambda: (place / "runs" / "tiny" / "log.sqlite").exists(), WAIT_S)
    for name, engine in (("w0", "torch"), (DRAINED, "vllm")):
        running.append(start(place, "worker", *words, "--name", name, "--engine", engine))
    until_joined(place, dict(zip(("w0", DRAINED), running[1:], strict=True)))
    running.append(start(place, "trainer", *words))
    until(lambda: samples(place), WAIT_S)
    drain(place)
    assert [process.wait(WAIT_S) for process in running] == [0] * len(running), (
        place / "said"
    ).read_text()
    assert_clean(place, "tiny")
    assert joined(place) == {"w0": "torch", DRAINED: "vllm"}
    released = [release for release in of(place, RequestReleased) if release.worker == DRAINED]
    actual_trajectories = trajectories(place)
    removed = [
        actual_trajectories[release.trajectory] for release in released if release.kv is not None
    ]
    assert removed, released
    for trajectory in removed:
        first, second = (part for part in trajectory.segments if part.kind == "model")
        assert (first.worker, second.worker) == (DRAINED, "w0")
        assert trajectory.meta.migrations == 0 and second.start in trajectory.meta.prefills


def test_colocated_vllm_worker_sleeps_for_every_step_and_the_audit_is_clean(place: Path) -> None:
    words = ("-o", "workers.count=2", "-o", "workers.colocated=1", "-o", "workers.engine=vllm")
    assert call(place, "run", "config.toml", *words) == 0, (place / "said").read_text()
    assert steps(place, "tiny") == [0, 1, 2]
    assert_clean(place, "tiny")
    assert {event.worker: event.colocated for event in of(place, WorkerJoined)} == {
        "w0": False,
        "w1": True,
    }
    slept = [
        entry for entry in of(place, WorkerReady) if entry.worker == "w1" and entry.version < 0
    ]
    assert slept and call(place, "replay", "tiny") == 0, (place / "said").read_text()


def test_lora_run_has_one_vllm_worker_that_hosts_every_version(place: Path) -> None:
    vllm = ("-o", "workers.engine=vllm", "-o", f"workers.vllm.dtype={LORA_DTYPE}")
    words = ("-o", "workers.count=1", *vllm, "-o", "run.steps=6")
    lora = ("-o", "lora.rank=4", "-o", "trainer.learning_rate=1e-2", "-o", "rollout.group_size=8")
    assert call(place, "run", "config.toml", *words, *lora) == 0, (place / "said").read_text()
    assert joined(place) == {"w0": "vllm"}
    assert steps(place, "tiny") == list(range(6))
    assert_clean(place, "tiny")
    actual_facts = list(facts(place, "tiny"))
    assert {
        event.max_resident_versions for event in actual_facts if isinstance(event, WorkerJoined)
    } == {4}
    assert len({event.version for event in actual_facts if isinstance(event, WorkerReady)}) > 4
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


def test_mixture_on_vllm_is_trained_by_its_experts_made_again_and_exported(place: Path) -> None:
    shutil.rmtree(place / "model")
    BUILDERS["qwen3_moe"](place / "model", scale=1.0)  # so that answers of a group differ
    vllm = ("-o", "workers.engine=vllm", "-o", "sampling.return_routed_experts=true")
    words = ("-o", "workers.count=1", "-o", "rollout.group_size=8", *vllm)
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
    trained = [
        trajectory
        for trajectory in trajectories(place).values()
        if trajectory.meta.purpose == "train"
    ]
    assert trained and all(entry.routed_experts is not None for entry in trained)
    assert numerics(place) < ROUTED_MAX[DTYPE]


def numerics(path: Path) -> float:
    """The largest distance of the trainer's log-probs from vLLM's under equal weights."""
    (path / "said").unlink()
    assert call(path, "mismatch", "tiny", "--json") == 0
    lines = (path / "said").read_text().splitlines()
    (measured,) = (json.loads(line) for line in lines if line.startswith("{"))
    return float(measured["causes"]["numerics"]["largest"])


def test_model_without_kernels_stops_the_run_with_one_line(place: Path) -> None:
    need_cpu()
    shutil.rmtree(place / "model")
    make_llama_gqa(place / "model")  # heads of 24
    assert call(place, "run", "config.toml", "-o", "workers.engine=vllm") == 9
    text = (place / "said").read_text()
    assert "vLLM does not support the model" in text and "heads of 24" in text

"""Runs whose workers have vLLM, or one of them, whose server may be killed. `make test-vllm`."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.config.workers import Vllm
from dora_pipe.launch.run_dir import opened
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
    return start(path, *words).wait(WAIT_S)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
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
    directory: Path, ranks: int
) -> None:
    words = ["config.toml", "-o", f"run.steps={STEPS}", "-o", "rollout.group_size=8"]
    words += ["-o", f"workers.vllm.tensor_parallel_size={ranks}"]
    orchestrator = start(directory, "orchestrator", *words)
    until(lambda: (directory / "runs" / "tiny" / "log.sqlite").exists(), WAIT_S)
    served = start(directory, "worker", *words, "--name", "a", "--engine", "vllm")
    until_joined(directory, {"a": served})
    other = start(directory, "worker", *words, "--name", "b")
    until_joined(directory, {"b": other})
    trainer = start(directory, "trainer", *words)
    output = directory / "said"
    until(lambda: len(steps(directory, "tiny")) >= 3, WAIT_S)
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
    assert steps(directory, "tiny") == list(range(STEPS))
    assert_clean(directory, "tiny")
    assert start(directory, "audit", "tiny").wait(WAIT_S) == 0
    assert "vllm 0." in output.read_text()
    with opened("tiny", directory / "runs") as run:
        report = audit(run.bus, run.topics, run.store)
    by_engine = {engine.engine: engine.trajectories for engine in report.engines}
    assert min(by_engine[name] for name in ("vllm", "torch")) > 0
    assert sum(by_engine.values()) == report.record_statuses["bound"]
    assert len(key) > 32
    for file in directory.rglob("*"):
        assert not file.is_file() or key.encode() not in file.read_bytes(), file


def test_requests_move_with_their_caches_between_servers_of_two_ranks_and_outlive_one(
    directory: Path,
) -> None:
    words = (
        "config.toml",
        *WORDS,
        "-o",
        "workers.max_num_seqs=16",
        "-o",
        "workers.vllm.tensor_parallel_size=2",
    )
    orchestrator = start(directory, "orchestrator", *words)
    until(lambda: (directory / "runs" / "tiny" / "log.sqlite").exists(), WAIT_S)
    served = [
        start(directory, "worker", *words, "--name", name, "--engine", "vllm")
        for name in ("w0", DRAINED)
    ]
    until_joined(directory, dict(zip(("w0", DRAINED), served, strict=True)))
    trainer = start(directory, "trainer", *words)
    until(lambda: samples(directory), WAIT_S)
    drain(directory)
    until(
        lambda: any(trajectory.meta.migrations for trajectory in trajectories(directory).values()),
        WAIT_S,
    )
    os.kill(_server_of(served[0].pid), signal.SIGKILL)
    output = directory / "said"
    assert served[0].wait(WAIT_S) == 7, output.read_text()
    late = start(directory, "worker", *words, "--name", "late", "--engine", "torch")
    ends = [process.wait(WAIT_S) for process in (orchestrator, served[1], late, trainer)]
    assert ends == [0] * 4, output.read_text()
    assert_clean(directory, "tiny")
    released = {
        release.trajectory for release in of(directory, RequestReleased) if release.kv is not None
    }
    moved = [
        trajectory for trajectory in trajectories(directory).values() if trajectory.meta.migrations
    ]
    assert moved and {entry.trajectory for entry in moved} <= released
    for trajectory in moved:
        first, second = [part for part in trajectory.segments if part.kind == "model"][:2]
        assert (first.worker, second.worker) == (DRAINED, "w0")
        assert second.start not in trajectory.meta.prefills


def test_worker_of_a_run_takes_the_vllm_server_at_its_address(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerProcess.start(directory / "model", Vllm(), slots=8, context_tokens=64, threads=1)
    try:
        monkeypatch.setenv(KEY_VARIABLE, server.address.key)
        words = ("-o", "workers.count=1", "-o", "workers.engine=vllm")
        address = ("-o", f'workers.vllm.addresses=["{server.address}"]')
        run = start(directory, "run", "config.toml", *words, *address)
        assert run.wait(WAIT_S) == 0, (directory / "said").read_text()
        server.check()
    finally:
        server.close()
    assert joined(directory) == {"w0": "vllm"}
    assert steps(directory, "tiny") == [0, 1, 2]
    assert_clean(directory, "tiny")


def test_requests_of_a_drained_vllm_worker_are_prefilled_by_another_engine(directory: Path) -> None:
    words = ("config.toml", *WORDS, "-o", "workers.max_num_seqs=16")
    running = [start(directory, "orchestrator", *words)]
    until(lambda: (directory / "runs" / "tiny" / "log.sqlite").exists(), WAIT_S)
    for name, engine in (("w0", "torch"), (DRAINED, "vllm")):
        running.append(start(directory, "worker", *words, "--name", name, "--engine", engine))
    until_joined(directory, dict(zip(("w0", DRAINED), running[1:], strict=True)))
    running.append(start(directory, "trainer", *words))
    until(lambda: samples(directory), WAIT_S)
    drain(directory)
    assert [process.wait(WAIT_S) for process in running] == [0] * len(running), (
        directory / "said"
    ).read_text()
    assert_clean(directory, "tiny")
    assert joined(directory) == {"w0": "torch", DRAINED: "vllm"}
    released = [release for release in of(directory, RequestReleased) if release.worker == DRAINED]
    actual_trajectories = trajectories(directory)
    removed = [
        actual_trajectories[release.trajectory] for release in released if release.kv is not None
    ]
    assert removed, released
    for trajectory in removed:
        first, second = (part for part in trajectory.segments if part.kind == "model")
        assert (first.worker, second.worker) == (DRAINED, "w0")
        assert trajectory.meta.migrations == 0 and second.start in trajectory.meta.prefills


def test_colocated_vllm_worker_sleeps_for_every_step_and_the_audit_is_clean(
    directory: Path,
) -> None:
    words = ("-o", "workers.count=2", "-o", "workers.colocated=1", "-o", "workers.engine=vllm")
    assert call(directory, "run", "config.toml", *words) == 0, (directory / "said").read_text()
    assert steps(directory, "tiny") == [0, 1, 2]
    assert_clean(directory, "tiny")
    assert {event.worker: event.colocated for event in of(directory, WorkerJoined)} == {
        "w0": False,
        "w1": True,
    }
    slept = [
        entry for entry in of(directory, WorkerReady) if entry.worker == "w1" and entry.version < 0
    ]
    assert slept and call(directory, "replay", "tiny") == 0, (directory / "said").read_text()


def test_lora_run_has_one_vllm_worker_that_hosts_every_version(directory: Path) -> None:
    vllm = ("-o", "workers.engine=vllm", "-o", f"workers.vllm.dtype={LORA_DTYPE}")
    words = ("-o", "workers.count=1", *vllm, "-o", "run.steps=6")
    lora = ("-o", "lora.rank=4", "-o", "trainer.learning_rate=1e-2", "-o", "rollout.group_size=8")
    assert call(directory, "run", "config.toml", *words, *lora) == 0, (
        directory / "said"
    ).read_text()
    assert joined(directory) == {"w0": "vllm"}
    assert steps(directory, "tiny") == list(range(6))
    assert_clean(directory, "tiny")
    actual_facts = list(facts(directory, "tiny"))
    assert {
        event.max_resident_versions for event in actual_facts if isinstance(event, WorkerJoined)
    } == {4}
    assert len({event.version for event in actual_facts if isinstance(event, WorkerReady)}) > 4
    assert call(directory, "replay", "tiny") == 0, (directory / "said").read_text()
    assert numerics(directory) < NUMERICS_MAX


def test_agents_on_vllm_are_logged_token_by_token_and_made_again(directory: Path) -> None:
    vllm = ("-o", "workers.engine=vllm")
    check_agents_run(directory, *vllm, steps_made=2, numerics_max=NUMERICS_MAX)
    assert joined(directory) == {"w0": "vllm"}


def test_agents_of_several_lora_versions_are_beside_each_other_on_vllm(directory: Path) -> None:
    vllm = ("-o", "workers.engine=vllm", "-o", f"workers.vllm.dtype={LORA_DTYPE}")
    lora = ("-o", "lora.rank=4", "-o", "trainer.learning_rate=1e-2")
    check_agents_run(directory, *vllm, *lora, steps_made=4, numerics_max=NUMERICS_MAX)
    assert versions_at_once(directory) > 1


def test_mixture_on_vllm_is_trained_by_its_experts_made_again_and_exported(directory: Path) -> None:
    shutil.rmtree(directory / "model")
    BUILDERS["qwen3_moe"](directory / "model", scale=1.0)  # so that answers of a group differ
    vllm = ("-o", "workers.engine=vllm", "-o", "sampling.return_routed_experts=true")
    words = ("-o", "workers.count=1", "-o", "rollout.group_size=8", *vllm)
    for command in (
        ("run", "config.toml", *words),
        ("audit", "tiny"),
        ("replay", "tiny"),
        ("export", "policy", "tiny", "3", "out"),
    ):
        assert call(directory, *command) == 0, (directory / "said").read_text()
    assert steps(directory, "tiny") == [0, 1, 2]
    assert_clean(directory, "tiny")
    again = read_manifest(directory / "out" / "model.safetensors").digest
    assert again != read_manifest(directory / "model" / "model.safetensors").digest
    trained = [
        trajectory
        for trajectory in trajectories(directory).values()
        if trajectory.meta.purpose == "train"
    ]
    assert trained and all(entry.routed_experts is not None for entry in trained)
    assert numerics(directory) < ROUTED_MAX[DTYPE]


def numerics(path: Path) -> float:
    (path / "said").unlink()
    assert call(path, "mismatch", "tiny", "--json") == 0
    lines = (path / "said").read_text().splitlines()
    (measured,) = (json.loads(line) for line in lines if line.startswith("{"))
    return float(measured["causes"]["numerics"]["largest"])


def test_model_without_kernels_stops_the_run_with_one_line(directory: Path) -> None:
    need_cpu()
    shutil.rmtree(directory / "model")
    make_llama_gqa(directory / "model")  # heads of 24
    assert call(directory, "run", "config.toml", "-o", "workers.engine=vllm") == 9
    text = (directory / "said").read_text()
    assert "vLLM does not support the model" in text and "heads of 24" in text

"""Tests of Kubernetes manifests against command line and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_pipe.bus.kafka.security import PASSWORD_VARIABLE
from dora_pipe.config.load import load_config
from dora_pipe.config.model import Config
from dora_pipe.launch.nodes import Node, environments, ranks_per_node
from tests.support.cli_words import parsed
from tests.support.kustomize import built, listed
from tests.support.tidy import ROOT

BASE, NODES = "kubernetes", "kubernetes-nodes"
GPU = "nvidia.com/gpu"
DOWNWARD = {"$(POD_NAME)": "worker-3", "$(POD_INDEX)": "1"}
"""Values that Kubernetes substitutes."""

BUILT = {name: built(ROOT / "infra" / name) for name in (BASE, NODES)}
KINDS = {
    (name, role): kind
    for name, objects in BUILT.items()
    for kind, role in objects
    if kind in ("Deployment", "StatefulSet")
}
PODS = sorted(KINDS)
"""Pods by folder and role."""

each_pod = pytest.mark.parametrize(("name", "role"), PODS)


def _workload(name: str, role: str) -> dict[str, Any]:
    result: dict[str, Any] = BUILT[name][KINDS[name, role], role]["spec"]
    return result


def _pod(name: str, role: str) -> dict[str, Any]:
    result: dict[str, Any] = _workload(name, role)["template"]["spec"]
    return result


def _container(name: str, role: str) -> dict[str, Any]:
    (container,) = _pod(name, role)["containers"]
    actual_container: dict[str, Any] = container
    return actual_container


def _words(name: str, role: str) -> list[str]:
    return [DOWNWARD.get(word, word) for word in _container(name, role)["args"]]


def _config(name: str, role: str, tmp_path: Path) -> Config:
    _, params = parsed(_words(name, role))
    path = tmp_path / params["config"].name
    path.write_text(BUILT[name]["ConfigMap", "run"]["data"][params["config"].name])
    return load_config(path, params["override"])


@pytest.mark.parametrize("name", [BASE, NODES])
def test_kustomization_lists_every_file(name: str) -> None:
    files = [entry for entry in listed(ROOT / "infra" / name) if entry != f"../{BASE}"]
    there = {path.name for path in (ROOT / "infra" / name).glob("*.yaml")} - {"kustomization.yaml"}
    assert set(files) == there
    assert len(files) == len(there)
    assert [role for of, role in PODS if of == name] == ["orchestrator", "trainer", "worker"]


@each_pod
def test_arguments_are_words_of_the_command_line(name: str, role: str) -> None:
    container = _container(name, role)
    assert "command" not in container, "the image's entry point is dora-pipe"
    words = _words(name, role)
    assert not [word for word in words if "$(" in word]
    command, params = parsed(words)
    assert command == role
    assert params["root"] == Path("/runs")
    given = {f"$({row['name']})" for row in container["env"]}
    assert {word for word in container["args"] if word in DOWNWARD} == given & DOWNWARD.keys()
    if role == "worker":
        assert params["name"] == DOWNWARD["$(POD_NAME)"]
    expected = "slim" if role == "orchestrator" else {BASE: "torch", NODES: "gpu"}[name]
    assert container["image"] == f"dora-pipe:{expected}"
    assert f"AS {expected}\n" in (ROOT / "infra" / "Dockerfile").read_text()


@each_pod
def test_configuration_is_one_and_every_path_in_it_is_mounted(
    name: str, role: str, tmp_path: Path
) -> None:
    config, mounts = _config(name, role, tmp_path), _container(name, role)["volumeMounts"]
    mounted = [mount["mountPath"] for mount in mounts]
    task, bus = config.task, config.bus
    paths = [config.model.path, str(task.data), str(task.eval_data), task.directory]
    for path in (*paths, config.store.path, bus.ca_file, "/config/run.toml"):
        assert [position for position in mounted if Path(path).is_relative_to(position)], path
    writable = {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}
    assert writable - {"/dev/shm"} == {"/store", "/runs"}
    assert bus.username == role
    grace_s = _pod(name, role)["terminationGracePeriodSeconds"]
    assert max(config.timing.lease_s, config.timing.stop_timeout_s) < grace_s


@each_pod
def test_secrets_come_by_reference_under_the_name_that_is_read(name: str, role: str) -> None:
    secret = {
        row["name"]: row["valueFrom"]["secretKeyRef"]
        for row in _container(name, role)["env"]
        if "secretKeyRef" in row.get("valueFrom", {})
    }
    assert secret == {PASSWORD_VARIABLE: {"name": "kafka", "key": role}}
    assert not [kind for kind, _ in BUILT[name] if kind == "Secret"], "secrets are never files here"


def test_nodes_of_the_trainer_meet_at_the_first_pod_and_each_rank_has_a_gpu(tmp_path: Path) -> None:
    spec, config = _workload(NODES, "trainer"), _config(NODES, "trainer", tmp_path)
    _, params = parsed(_words(NODES, "trainer"))
    node = Node(nodes=params["nodes"], node=params["node"], rendezvous=params["rendezvous"])
    assert (node.nodes, node.node) == (spec["replicas"], 1)
    service = BUILT[NODES]["Service", spec["serviceName"]]["spec"]
    (port,) = service["ports"]
    assert node.rendezvous == f"trainer-0.{spec['serviceName']}:{port['port']}"
    assert service["selector"] == spec["selector"]["matchLabels"]
    # Pods are found before they are ready, since they become ready by meeting.
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    ranks = ranks_per_node(config, node)
    assert _container(NODES, "trainer")["resources"]["limits"] == {GPU: ranks}
    assert {environment["WORLD_SIZE"] for environment in environments(node, ranks)} == {
        str(config.trainer.ranks)
    }


def test_a_worker_of_several_gpus_is_a_pod_of_as_many(tmp_path: Path) -> None:
    config = _config(NODES, "worker", tmp_path)
    limits = _container(NODES, "worker")["resources"]["limits"]
    assert limits == {GPU: config.workers.vllm.tensor_parallel_size}
    assert config.workers.vllm.tensor_parallel_size > 1
    assert _config(NODES, "orchestrator", tmp_path).trainer == config.trainer

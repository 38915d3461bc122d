"""The Kubernetes manifests say what the command line, the configuration and each other allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dora_pipe.bus.kafka.security import PASSWORD_VARIABLE
from dora_pipe.config.load import load_config
from dora_pipe.config.model import Config
from tests.support.cli_words import parsed
from tests.support.tidy import ROOT

FOLDER = ROOT / "infra" / "kubernetes"
POD_NAME = "worker-3"
"""What Kubernetes puts in the place of $(POD_NAME)."""


def _documents() -> Iterator[dict[str, Any]]:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    for name in listed:
        yield from yaml.safe_load_all((FOLDER / name).read_text())


OBJECTS = {(one["kind"], one["metadata"]["name"]): one for one in _documents()}
WORKLOADS = {
    name: one["spec"]["template"]["spec"]
    for (kind, name), one in OBJECTS.items()
    if kind in ("Deployment", "StatefulSet")
}
ROLES = sorted(WORKLOADS)


def _container(role: str) -> dict[str, Any]:
    (container,) = WORKLOADS[role]["containers"]
    found: dict[str, Any] = container
    return found


def _config(role: str, tmp_path: Path) -> Config:
    """The configuration as the role gets it."""
    _, params = parsed(_container(role)["args"])
    path = tmp_path / params["config"].name
    path.write_text(OBJECTS["ConfigMap", "run"]["data"][params["config"].name])
    return load_config(path, params["override"])


def test_kustomization_lists_every_file() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    there = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == there
    assert len(listed) == len(there)
    assert ROLES == ["orchestrator", "trainer", "worker"]


@pytest.mark.parametrize("role", ROLES)
def test_arguments_are_words_of_the_command_line(role: str) -> None:
    container = _container(role)
    assert "command" not in container, "the image's entry point is dora-pipe"
    names = {one["name"] for one in container["env"]}
    words = [word.replace("$(POD_NAME)", POD_NAME) for word in container["args"]]
    assert not [word for word in words if "$(" in word]
    command, params = parsed(words)
    assert command == role
    assert params["root"] == Path("/runs")
    if role == "worker":
        assert params["name"] == POD_NAME
        assert "POD_NAME" in names
    wanted = "slim" if role == "orchestrator" else "torch"
    assert container["image"] == f"dora-pipe:{wanted}"


@pytest.mark.parametrize("role", ROLES)
def test_configuration_is_one_and_every_path_in_it_is_mounted(role: str, tmp_path: Path) -> None:
    config = _config(role, tmp_path)
    mounted = [one["mountPath"] for one in _container(role)["volumeMounts"]]
    task, bus = config.task, config.bus
    paths = [config.model.path, str(task.data), str(task.eval_data), task.directory]
    for path in (*paths, config.store.path, bus.ca_file, "/config/run.toml"):
        assert [at for at in mounted if Path(path).is_relative_to(at)], path
    writable = {
        one["mountPath"] for one in _container(role)["volumeMounts"] if not one.get("readOnly")
    }
    assert writable == {"/store", "/runs"}
    assert bus.username == role
    assert config.timing.lease_s < WORKLOADS[role]["terminationGracePeriodSeconds"]
    assert config.timing.stop_timeout_s < WORKLOADS[role]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("role", ROLES)
def test_secrets_come_by_reference_under_the_name_that_is_read(role: str) -> None:
    secret = {
        one["name"]: one["valueFrom"]["secretKeyRef"]
        for one in _container(role)["env"]
        if "secretKeyRef" in one.get("valueFrom", {})
    }
    assert secret == {PASSWORD_VARIABLE: {"name": "kafka", "key": role}}
    assert not [kind for kind, _ in OBJECTS if kind == "Secret"], "secrets are never files here"


@pytest.mark.parametrize("role", ROLES)
def test_every_volume_is_declared_and_used(role: str) -> None:
    spec = WORKLOADS[role]
    declared = {one["name"]: one for one in spec["volumes"]}
    used = [one["name"] for one in _container(role)["volumeMounts"]]
    assert sorted(declared) == sorted(used)
    for volume in declared.values():
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            assert ("PersistentVolumeClaim", name) in OBJECTS
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in OBJECTS
    store = OBJECTS["PersistentVolumeClaim", "store"]
    assert store["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("kind_name", [key for key in OBJECTS if key[1] in WORKLOADS])
def test_selectors_find_their_pods_and_one_fenced_role_runs_once(
    kind_name: tuple[str, str],
) -> None:
    spec = OBJECTS[kind_name]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == {"app": "dora-pipe", "role": kind_name[1]}
    if kind_name[1] != "worker":
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


@pytest.mark.parametrize("role", ROLES)
def test_pods_run_as_the_user_of_the_image(role: str) -> None:
    context = WORKLOADS[role]["securityContext"]
    text = (ROOT / "infra" / "Dockerfile").read_text()
    assert f"--uid {context['runAsUser']} " in text
    assert context["runAsNonRoot"] is True

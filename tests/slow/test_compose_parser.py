"""Compose's own parser reads compose.yaml without a complaint, and as tests/support reads it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.compose import Service, read
from tests.support.tidy import ROOT

pytestmark = pytest.mark.slow

SOURCE = ROOT / "tests" / "support" / "compose_parser"
BUILD_LIMIT_S = 300
LIMIT_S = 60
VARIABLES = {"DORA_PIPE_STEPS": "4", "DORA_PIPE_SFT_STEPS": "", "DORA_PIPE_RUN": "mine"}

OBSERVERS = {"metrics", "traces", "prometheus", "grafana", "otel-collector", "jaeger"}
PROFILES = {
    "": {"kafka"} | OBSERVERS,
    "single": {"kafka"},
    "cluster": {"kafka-1", "kafka-2", "kafka-3"},
    "single,observe": {"kafka"} | OBSERVERS,
    "cluster,observe,kafka-ui": {"kafka-1", "kafka-2", "kafka-3", "kafka-ui"} | OBSERVERS,
}
ALL = "single,cluster,observe,demo,kafka-ui"
ROLES = {"prepare", "topics", "orchestrator", "worker-0", "worker-1", "trainer", "audit"}


@pytest.fixture(scope="module")
def parser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parser as a program, built by Go from its pinned sources."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("Compose's parser needs Go, not found on this machine")
    program = tmp_path_factory.mktemp("compose") / "parser"
    done = subprocess.run(
        [go, "build", "-o", str(program), "."],
        cwd=SOURCE,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"Go could not build Compose's parser: {done.stderr.strip()[-300:]}")
    return program


def parse(
    parser: Path,
    *,
    profiles: str = "",
    folder: Path = ROOT,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The parser in a folder, in the environment of a user who set these variables."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("COMPOSE", "DORA"))}
    chosen = {"COMPOSE_PROFILES": profiles} if profiles else {}
    return subprocess.run(
        [str(parser)],
        cwd=folder,
        env={**outside, **chosen, **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def project(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What it read; there was nothing to complain of."""
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def services(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What it would start."""
    found: dict[str, Any] = project(done)["services"]
    return found


def as_read(service: Service) -> dict[str, Any]:
    """What our reading knows of a service, in the parser's form."""
    command = list(service.words[len(service.entrypoint or ()) :])
    return {
        "image": service.image,
        "profiles": list(service.profiles),
        "command": command or None,
        "entrypoint": None if service.entrypoint is None else list(service.entrypoint),
        "environment": dict(service.environment),
        "volumes": dict(service.volumes),
        "mounts": {target: str(source) for target, source in service.mounts.items()},
        "files": dict(service.files),
        "ports": list(service.raw.get("ports", [])),
        "depends_on": dict(service.depends_on),
    }


def as_parsed(raw: dict[str, Any], configs: dict[str, Any]) -> dict[str, Any]:
    """The same of the parser's."""
    depends = raw.get("depends_on", {})
    volumes = raw.get("volumes", [])
    mounts = {"mounts": "bind", "volumes": "volume"}
    return {
        **{
            name: {one["target"]: one["source"] for one in volumes if one["type"] == kind}
            for name, kind in mounts.items()
        },
        "files": {
            one["target"]: configs[one["source"]]["content"] for one in raw.get("configs", [])
        },
        "ports": [
            f"{one['host_ip']}:{one['published']}:{one['target']}" for one in raw.get("ports", [])
        ],
        "image": raw["image"],
        "profiles": raw["profiles"],
        "command": raw.get("command"),
        "entrypoint": raw.get("entrypoint"),
        "environment": raw.get("environment") or {},
        "depends_on": {k: (v["condition"], v["required"]) for k, v in depends.items()},
    }


@pytest.mark.parametrize("profiles", sorted(PROFILES))
def test_a_profile_starts_its_brokers_and_with_the_demo_its_roles(
    parser: Path, profiles: str
) -> None:
    assert services(parse(parser, profiles=profiles)).keys() == PROFILES[profiles]
    if profiles:
        both = services(parse(parser, profiles=f"{profiles},demo"))
        assert both.keys() == PROFILES[profiles] | ROLES


@pytest.mark.parametrize("variables", [{}, VARIABLES], ids=["defaults", "given"])
def test_parser_reads_every_service_as_the_tests_do(
    parser: Path, variables: dict[str, str]
) -> None:
    whole = project(parse(parser, profiles=ALL, variables=variables))
    ours = read(variables)
    assert whole["services"].keys() == ours.keys()
    for name, raw in whole["services"].items():
        assert as_parsed(raw, whole["configs"]) == as_read(ours[name]), name


def test_images_are_built_from_the_top_of_the_repository(parser: Path) -> None:
    found = services(parse(parser, profiles="single,demo,observe"))
    built = {name: raw["build"]["context"] for name, raw in found.items() if "build" in raw}
    assert built == dict.fromkeys(ROLES | {"metrics", "traces"}, str(ROOT))


def test_file_of_infra_means_the_same_by_itself(parser: Path) -> None:
    top = parse(parser, profiles="cluster,demo,observe,kafka-ui")
    below = parse(parser, profiles="cluster,demo,observe,kafka-ui", folder=ROOT / "infra")
    assert services(top) == services(below)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("services: {a: {image: b, depends_on: [nobody]}}", "nobody"),
        ("services: {a: {image: [b]}}", "image"),
        ("services: {a: {image: b, volumes: ['data:/d']}}", "undefined volume data"),
    ],
)
def test_parser_refuses_what_compose_would_refuse(
    parser: Path, tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "compose.yaml").write_text(text)
    done = parse(parser, folder=tmp_path)
    assert done.returncode == 1
    assert complaint in done.stderr

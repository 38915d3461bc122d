"""Compose's own parser reads compose.yaml without a complaint, and as tests/support reads it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.compose import Service, read
from tests.support.tidy import ROOT

pytestmark = pytest.mark.slow

PARSER = "github.com/compose-spec/compose-go/v2/cmd@v2.16.2"
BUILT = ROOT / "build" / "compose-go"
BUILD_LIMIT_S = 300
LIMIT_S = 60
VARIABLES = {"DORA_PIPE_STEPS": "4", "DORA_PIPE_SFT_STEPS": ""}


@pytest.fixture(scope="module")
def parser() -> Path:
    """The parser as a program, built once by Go and kept under build/."""
    program = BUILT / "cmd"
    if program.is_file():
        return program
    go = shutil.which("go")
    if go is None:
        pytest.skip("Compose's parser needs Go, not found on this machine")
    done = subprocess.run(
        [go, "install", PARSER],
        env={**os.environ, "GOBIN": str(BUILT)},
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"Go could not build Compose's parser: {done.stderr.strip()[-300:]}")
    return program


def model(parser: Path, *files: str, variables: dict[str, str]) -> dict[str, Any]:
    """What the parser makes of the files."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("COMPOSE", "DORA"))}
    done = subprocess.run(
        [str(parser), "-format", "json", *files],
        cwd=ROOT,
        env={**outside, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


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
        "depends_on": dict(service.depends_on),
    }


def as_parsed(raw: dict[str, Any]) -> dict[str, Any]:
    """The same of the parser's."""
    depends = raw.get("depends_on", {})
    return {
        "image": raw["image"],
        "profiles": raw["profiles"],
        "command": raw.get("command"),
        "entrypoint": raw.get("entrypoint"),
        "environment": raw["environment"],
        "volumes": {one["target"]: one["source"] for one in raw["volumes"]},
        "depends_on": {k: (v["condition"], v["required"]) for k, v in depends.items()},
    }


@pytest.mark.parametrize("variables", [{}, VARIABLES], ids=["defaults", "given"])
def test_parser_reads_every_service_as_the_tests_do(
    parser: Path, variables: dict[str, str]
) -> None:
    found = model(parser, variables=variables)["services"]
    ours = read(variables)
    assert {name: as_parsed(raw) for name, raw in found.items()} == {
        name: as_read(service) for name, service in ours.items()
    }


def test_top_file_and_the_one_of_infra_mean_the_same(parser: Path) -> None:
    top = model(parser, "compose.yaml", variables={})
    below = model(parser, "infra/docker-compose.yml", variables={})
    assert top == below
    assert top["name"] == "dora-pipe"
    assert set(top["volumes"]) == {
        source for service in read().values() for source in service.volumes.values()
    }


def test_parser_refuses_what_compose_would_refuse(parser: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("services: {a: {image: b, depends_on: [nobody]}}\n")
    with pytest.raises(AssertionError, match="nobody"):
        model(parser, str(wrong), variables={})

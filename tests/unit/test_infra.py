"""Tests that container and jar brokers are configured equally."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.cli_words import parsed
from tests.support.compose import Service, read
from tests.support.tidy import ROOT

SERVICES = read()
BROKERS = {name: service for name, service in SERVICES.items() if service.is_broker}
ROLES = {name: service for name, service in SERVICES.items() if service.profiles == ("demo",)}
CLUSTER = [service for service in BROKERS.values() if service.profiles == ("cluster",)]


def _jars(name: str) -> dict[str, str]:
    lines = (ROOT / "infra/kafka" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("name", sorted(BROKERS))
def test_container_and_jars_run_the_same_kafka(name: str) -> None:
    pom = ET.parse(ROOT / "infra/kafka/pom.xml").getroot()
    version = pom.findtext("properties/kafka.version")
    assert BROKERS[name].image == f"apache/kafka:{version}"


def test_single_broker_has_the_settings_of_the_jars_and_no_other() -> None:
    assert BROKERS["kafka"].plain_settings() == _jars("server.properties")


@pytest.mark.parametrize("broker", CLUSTER, ids=lambda broker: str(broker.name))
def test_every_broker_of_the_cluster_has_the_settings_of_the_jars_and_no_other(
    broker: Service,
) -> None:
    expected = {**_jars("server.properties"), **_jars("cluster.properties")}
    assert broker.plain_settings() == expected


@pytest.mark.parametrize("name", sorted(set(ROLES) - {"prepare"}))
def test_words_of_every_role_are_understood_by_the_command_line(name: str) -> None:
    service = ROLES[name]
    command, params = parsed(service.words)
    assert command == {"topics": "create"}.get(name, name.split("-")[0])
    config = params.get("config")
    assert config is None or config == Path("/demo/config.toml")
    needs_torch = command in ("worker", "trainer")
    assert service.image == ("dora-pipe:torch" if needs_torch else "dora-pipe:slim")


def test_images_are_targets_of_one_dockerfile_that_takes_only_what_is_there() -> None:
    text = (ROOT / "infra/Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    for service in ROLES.values():
        build = service.raw["build"]
        assert (ROOT / "infra" / build["context"] / build["dockerfile"]).is_file()
        assert build["target"] in targets
        assert service.image == f"dora-pipe:{build['target']}"
    copied = re.findall(r"^COPY (requirements/.*) /requirements/$", text, re.MULTILINE)
    locks = [lock for line in copied for lock in line.split()]
    names = ("slim", "torch", "vllm", "vllm-deepspeed")
    assert locks == [f"requirements/{name}.txt" for name in names]
    assert all((ROOT / lock).is_file() for lock in locks)
    for target in {target for service in ROLES.values() for target in service.volumes}:
        assert f" {target} " in text, "a volume's folder that the image does not make is root's"


def _pins(lock: str) -> set[str]:
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines()
    return {line.removesuffix(" \\") for line in lines if line[:1].isalnum()}


def test_image_with_torch_holds_what_developers_have_and_nothing_for_development() -> None:
    text = (ROOT / "requirements/torch.txt").read_text()
    assert all("==" in pin for pin in _pins("torch"))
    assert all("--hash=sha256:" in word for word in re.split(r"\n(?=\w)", text)[1:])
    assert {pin.split("==")[0] for pin in _pins("slim")} <= {
        pin.split("==")[0] for pin in _pins("torch")
    }
    assert not {"pytest", "mypy", "ruff"} & {pin.split("==")[0] for pin in _pins("torch")}
    versions = {pin.split(" ")[0] for pin in _pins("dev")}
    assert {pin.split(" ")[0] for pin in _pins("torch")} <= versions

"""The broker in a container and the broker from jars are the same, and say the same things."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import yaml

from tests.support.tidy import ROOT

IMAGE_ONLY = {"log.dirs", "heap.opts"}
"""Settings that name a place or a size of the container."""
ADDRESSES = {
    "advertised.listeners",
    "controller.quorum.bootstrap.servers",
    "controller.quorum.voters",
    "listener.security.protocol.map",
    "listeners",
}


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "infra/docker-compose.yml").read_text())
    return loaded


def _container_settings() -> dict[str, str]:
    environment = _compose()["services"]["kafka"]["environment"]
    named = {k.removeprefix("KAFKA_"): str(v) for k, v in environment.items() if "KAFKA_" in k}
    return {name.lower().replace("_", "."): value for name, value in named.items()}


def _jar_settings() -> dict[str, str]:
    lines = (ROOT / "infra/kafka/server.properties").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_top_compose_file_includes_the_one_of_infra() -> None:
    top = yaml.safe_load((ROOT / "compose.yaml").read_text())
    assert top == {"name": _compose()["name"], "include": ["infra/docker-compose.yml"]}
    assert "kafka" in _compose()["services"]


def test_container_and_jars_run_the_same_kafka() -> None:
    image = _compose()["services"]["kafka"]["image"]
    pom = ET.parse(ROOT / "infra/kafka/pom.xml").getroot()
    version = pom.findtext("properties/kafka.version")
    assert image == f"apache/kafka:{version}"


def test_container_and_jars_agree_on_every_setting_that_both_name() -> None:
    container, jars = _container_settings(), _jar_settings()
    shared = (container.keys() & jars.keys()) - IMAGE_ONLY - ADDRESSES
    assert {"message.max.bytes", "auto.create.topics.enable", "process.roles"} <= shared
    assert {k: container[k] for k in shared} == {k: jars[k] for k in shared}
    missing = container.keys() - jars.keys() - IMAGE_ONLY - ADDRESSES
    assert missing == set(), "a setting that only the container has"


def test_every_listener_of_the_container_has_a_protocol_and_is_bound_to_this_machine() -> None:
    settings = _container_settings()
    names = set(re.findall(r"(\w+)://", settings["listeners"]))
    protocols = dict(p.split(":") for p in settings["listener.security.protocol.map"].split(","))
    assert names == set(protocols)
    ports = _compose()["services"]["kafka"]["ports"]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_volumes_that_services_use_are_declared() -> None:
    compose = _compose()
    used = {
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
        if not volume.startswith((".", "/"))
    }
    assert used == set(compose["volumes"])

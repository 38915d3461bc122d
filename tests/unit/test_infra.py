"""The broker in a container and the broker from jars are the same, and say the same things."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import yaml

from infra.kafka.broker import read_properties
from tests.support.cli_words import parsed
from tests.support.compose import ADDRESSES, IMAGE_ONLY, Service, read
from tests.support.tidy import FOLDERS, ROOT

SERVICES = read()
BROKERS = {name: service for name, service in SERVICES.items() if service.is_broker}
ROLES = {name: service for name, service in SERVICES.items() if service.profiles == ("demo",)}
CLUSTER = [service for service in BROKERS.values() if service.profiles == ("cluster",)]


def _jars(name: str) -> dict[str, str]:
    return read_properties(ROOT / "infra/kafka" / name)


def test_top_compose_file_includes_the_one_of_infra() -> None:
    top = yaml.safe_load((ROOT / "compose.yaml").read_text())
    below = yaml.safe_load((ROOT / "infra/docker-compose.yml").read_text())
    assert top == {"name": below["name"], "include": ["infra/docker-compose.yml"]}


def test_plain_compose_starts_one_broker_and_what_shows_a_run_on_it() -> None:
    assert "COMPOSE_PROFILES=single,observe\n" in (ROOT / ".env").read_text()
    profiles = {name: service.profiles for name, service in SERVICES.items()}
    assert [name for name, own in profiles.items() if own == ("single",)] == ["kafka"]
    assert len(CLUSTER) == 3
    assert {own for name, own in profiles.items() if name not in ROLES and name not in BROKERS} == {
        ("observe",),
        ("kafka-ui",),
    }


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
    wanted = {**_jars("server.properties"), **_jars("cluster.properties")}
    assert broker.plain_settings() == wanted


def test_settings_of_the_cluster_replace_those_that_one_broker_has() -> None:
    assert _jars("cluster.properties").keys() <= _jars("server.properties").keys()
    assert not (ADDRESSES | IMAGE_ONLY) & _jars("server.properties").keys()


@pytest.mark.parametrize("name", sorted(BROKERS))
def test_every_listener_has_a_protocol_and_is_bound_to_this_machine(name: str) -> None:
    settings = BROKERS[name].kafka_settings()
    names = set(re.findall(r"(\w+)://", settings["listeners"]))
    protocols = dict(p.split(":") for p in settings["listener.security.protocol.map"].split(","))
    assert names == set(protocols)
    (port,) = BROKERS[name].raw["ports"]
    outside = re.fullmatch(r"127\.0\.0\.1:(\d+):9092", port)
    assert outside is not None
    advertised = settings["advertised.listeners"].split(",")
    assert advertised == [f"PLAINTEXT://{name}:19092", f"PLAINTEXT_HOST://localhost:{outside[1]}"]


def test_brokers_of_the_cluster_are_different_members_of_one_cluster() -> None:
    settings = [broker.kafka_settings() for broker in CLUSTER]
    assert {one["node.id"] for one in settings} == {"1", "2", "3"}
    assert {one["controller.quorum.voters"] for one in settings} == {
        ",".join(f"{number}@kafka-{number}:9093" for number in (1, 2, 3))
    }
    assert len({broker.environment["CLUSTER_ID"] for broker in CLUSTER}) == 1
    assert len({tuple(broker.volumes.values()) for broker in CLUSTER}) == 3
    for broker in CLUSTER:  # the address that the demo names in both profiles
        assert broker.raw["networks"] == {"default": {"aliases": ["kafka"]}}


@pytest.mark.parametrize("name", sorted(BROKERS))
def test_every_broker_is_asked_whether_it_serves_and_has_time_to_stop(name: str) -> None:
    raw = BROKERS[name].raw
    assert "kafka-broker-api-versions.sh --bootstrap-server localhost:9092" in str(
        raw["healthcheck"]["test"]
    )
    assert raw["stop_grace_period"] == "1m"


def test_volumes_that_services_use_are_declared() -> None:
    below = yaml.safe_load((ROOT / "infra/docker-compose.yml").read_text())
    used = {source for service in SERVICES.values() for source in service.volumes.values()}
    assert used == set(below["volumes"])


@pytest.mark.parametrize("name", sorted(ROLES))
def test_every_role_waits_for_all_brokers_or_for_what_waited_for_them(name: str) -> None:
    seen, todo = set(), [name]
    while todo:
        for other in SERVICES[todo.pop()].depends_on:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    assert seen <= SERVICES.keys()
    assert name == "prepare" or seen >= BROKERS.keys()


@pytest.mark.parametrize("name", sorted(set(ROLES) - {"prepare"}))
def test_words_of_every_role_are_understood_by_the_command_line(name: str) -> None:
    service = ROLES[name]
    command, params = parsed(service.words)
    assert command == {"topics": "create"}.get(name, name.split("-")[0])
    config = params.get("config")
    assert config is None or config == Path("/demo/config.toml")
    needs_torch = command in ("worker", "trainer")
    assert service.image == ("dora-pipe:torch" if needs_torch else "dora-pipe:slim")


def test_every_role_has_the_policy_store_and_workers_have_names_of_their_own() -> None:
    assert all("/store" in ROLES[name].volumes for name in set(ROLES) - {"prepare"})
    calls = [parsed(service.words) for name, service in ROLES.items() if name != "prepare"]
    workers = [params["name"] for command, params in calls if command == "worker"]
    assert workers == ["w0", "w1"]


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


def test_what_the_image_is_built_of_is_not_ignored() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split())
    project = {*FOLDERS, "__init__.py", "py.typed", "pyproject.toml"}
    assert not ignored & {*project, "README.md", "LICENSE", "requirements"}
    assert {".git", ".venv*", "runs", "build"} <= ignored


def _pins(lock: str) -> set[str]:
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines()
    return {line.removesuffix(" \\") for line in lines if line[:1].isalnum()}


def test_image_with_torch_holds_what_developers_have_and_nothing_for_development() -> None:
    text = (ROOT / "requirements/torch.txt").read_text()
    assert all("==" in pin for pin in _pins("torch"))
    assert all("--hash=sha256:" in one for one in re.split(r"\n(?=\w)", text)[1:])
    assert {pin.split("==")[0] for pin in _pins("slim")} <= {
        pin.split("==")[0] for pin in _pins("torch")
    }
    assert not {"pytest", "mypy", "ruff"} & {pin.split("==")[0] for pin in _pins("torch")}
    versions = {pin.split(" ")[0] for pin in _pins("dev")}
    assert {pin.split(" ")[0] for pin in _pins("torch")} <= versions

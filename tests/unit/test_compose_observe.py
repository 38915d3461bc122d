"""Tests of observability in the compose file: files, ports, addresses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dora_pipe.launch.run_dir import RunDir
from tests.support.cli_words import parsed
from tests.support.compose import Service, read
from tests.support.prometheus import OBSERVE

SERVICES = read()
PUBLISHED = {name: service for name, service in SERVICES.items() if "ports" in service.raw}
OBSERVERS = {name: service for name, service in SERVICES.items() if service.files}


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _ports(service: Service) -> dict[str, str]:
    pairs = [re.fullmatch(r"127\.0\.0\.1:(\d+):(\d+)", entry) for entry in service.raw["ports"]]
    assert all(pairs), f"{service.name} is open to other machines: {service.raw['ports']}"
    return {pair[2]: pair[1] for pair in pairs if pair}


def _at_home(address: str) -> Service:
    match = re.search(r"(?:^|/)([\w-]+):(\d+)$", address)
    assert match, address
    return SERVICES[match[1]]


def test_every_port_is_bound_to_this_machine_and_none_twice_but_by_brokers_of_one_profile() -> None:
    taken = [port for service in PUBLISHED.values() for port in _ports(service).values()]
    assert len(taken) == len(set(taken))
    assert {"3000", "9090", "9464", "16686", "4318", "8080"} <= set(taken)


@pytest.mark.parametrize("service", SERVICES.values(), ids=lambda value: str(value.name))
def test_every_file_that_is_mounted_is_there_and_cannot_be_changed(service: Service) -> None:
    for target, source in service.mounts.items():
        assert source.exists(), f"{service.name}: {target}"
        assert source.resolve().is_relative_to(OBSERVE)
    mounted = [option for option in service.raw.get("volumes", []) if option.startswith(".")]
    assert all(entry.endswith(":ro") for entry in mounted)


def test_prometheus_finds_its_files_and_scrapes_services_at_their_ports() -> None:
    service = SERVICES["prometheus"]
    config = Path("/etc/prometheus/prometheus.yml")
    assert f"--config.file={config}" in service.words
    plain = _yaml(service.mounts[str(config)])
    for file in plain["rule_files"]:
        assert _yaml(service.mounts[str(config.parent / file)])["groups"]
    targets = [
        target
        for job in plain["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    ]
    assert targets == ["metrics:9464"]
    for target in targets:
        scraped = _at_home(target)
        assert target.split(":")[1] in _ports(scraped)
        assert parsed(scraped.words)[1]["port"] == int(target.split(":")[1])
    assert "/prometheus" in service.volumes
    assert any(word.startswith("--storage.tsdb.retention.size=") for word in service.words)


def test_grafana_finds_datasource_and_dashboards_where_they_are_mounted() -> None:
    service = SERVICES["grafana"]
    provisioning = Path("/etc/grafana/provisioning")
    (source,) = [
        mount for mount in service.mounts if mount.startswith(f"{provisioning}/datasources/")
    ]
    (provider,) = [
        mount for mount in service.mounts if mount.startswith(f"{provisioning}/dashboards/")
    ]
    (datasource,) = _yaml(service.mounts[source])["datasources"]
    asked = _at_home(datasource["url"])
    assert asked.name == "prometheus" and "9090" in _ports(asked)
    (folder,) = [row["options"]["path"] for row in _yaml(service.mounts[provider])["providers"]]
    assert service.mounts[folder].resolve() == (OBSERVE / "dashboards").resolve()
    uids = [json.loads(path.read_text())["uid"] for path in service.mounts[folder].glob("*.json")]
    assert len(set(uids)) == 3
    home = Path(service.environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (service.mounts[str(home.parent)] / home.name).is_file()


def test_collector_takes_what_the_exporter_sends_and_hands_it_to_jaeger() -> None:
    service = SERVICES["otel-collector"]
    (config,) = [word.removeprefix("--config=") for word in service.words]
    plain = _yaml(service.mounts[config])
    protocols = plain["receivers"]["otlp"]["protocols"]
    heard = {protocol["endpoint"].removeprefix("0.0.0.0:") for protocol in protocols.values()}
    assert heard | {plain["extensions"]["health_check"]["endpoint"][8:]} == set(_ports(service))
    for kind in ("receivers", "processors", "exporters"):
        for pipeline in plain["service"]["pipelines"].values():
            assert set(pipeline[kind]) == plain[kind].keys(), "declared and not used, or used only"
    assert plain["service"]["extensions"] == list(plain["extensions"])
    assert plain["service"]["pipelines"].keys() == {"traces"}
    (exporter,) = plain["exporters"].values()
    assert _at_home(exporter["endpoint"]).name == "jaeger"
    assert not any(name.startswith("debug") for name in plain["exporters"])
    sent = str(parsed(SERVICES["traces"].words)[1]["target"])
    assert _at_home(sent).name == "otel-collector"
    assert sent.split(":")[-1] in heard


@pytest.mark.parametrize("service", OBSERVERS.values(), ids=lambda value: str(value.name))
def test_observers_read_the_run_that_is_chosen_on_the_brokers_of_any_profile(
    service: Service, tmp_path: Path
) -> None:
    mine = read({"DORA_PIPE_RUN": "mine"})[service.name]
    command, params = parsed(mine.words)
    assert command == {"metrics": "metrics", "traces": "traces"}[service.name]
    ((target, content),) = mine.files.items()
    assert Path(target) == Path(params["run"]) / "config.toml"
    (tmp_path / "config.toml").write_text(content)
    config = RunDir(tmp_path).config()
    assert (config.run.name, config.bus.url) == ("mine", "kafka://kafka:19092")
    assert config.store.path in service.volumes
    assert service.volumes[config.store.path] == SERVICES["orchestrator"].volumes["/store"]
    brokers = {name for name, service in SERVICES.items() if service.is_broker}
    assert brokers <= service.depends_on.keys()
    assert all(service.depends_on[name] == ("service_healthy", False) for name in brokers)
    assert service.image == "dora-pipe:slim"
    assert mine.raw["labels"] != service.raw["labels"], "another run makes another container"

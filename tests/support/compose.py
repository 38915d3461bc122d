"""Runner of compose.yaml with plain processes instead of containers.

Our services keep their words and environment; brokers become `KafkaBroker`s with the same settings.
Only host names and volume paths change.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from tests.support.tidy import ROOT

BROKER_IMAGE: Final = "apache/kafka:"
ADDRESSES: Final = {
    "node.id",
    "advertised.listeners",
    "controller.quorum.voters",
    "listener.security.protocol.map",
    "listeners",
}
"""Settings that identify a broker and its cluster."""
IMAGE_ONLY: Final = {"log.dirs", "heap.opts"}
"""Settings specific to the container."""

_VARIABLE: Final = re.compile(r"\$(?:\$|\{(\w+)(?::-([^}]*))?\})")
POLL_S: Final = 0.1
PATH: Final = f"{Path(sys.executable).parent}:/usr/bin:/bin"
"""PATH of services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    name: str
    image: str
    profiles: tuple[str, ...]
    words: tuple[str, ...]
    """Entry point and command, without the image's entry point."""
    entrypoint: tuple[str, ...] | None
    environment: Mapping[str, str]
    volumes: Mapping[str, str]
    """Named volume by target."""
    mounts: Mapping[str, Path]
    """Repository path by target."""
    files: Mapping[str, str]
    """Inline content by target."""
    depends_on: Mapping[str, tuple[str, bool]]
    """(condition, required) by name."""
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def is_broker(self) -> bool:
        return self.image.startswith(BROKER_IMAGE)

    def kafka_settings(self) -> dict[str, str]:
        named = {k: v for k, v in self.environment.items() if k.startswith("KAFKA_")}
        return {k.removeprefix("KAFKA_").lower().replace("_", "."): v for k, v in named.items()}

    def plain_settings(self) -> dict[str, str]:
        given = self.kafka_settings()
        return {k: v for k, v in given.items() if k not in ADDRESSES | IMAGE_ONLY}


def read(variables: Mapping[str, str] | None = None) -> dict[str, Service]:
    top = yaml.safe_load((ROOT / "compose.yaml").read_text())
    services: dict[str, Service] = {}
    for path in top["include"]:
        plain = _interpolated(yaml.safe_load((ROOT / path).read_text()), variables or {})
        for name, raw in plain["services"].items():
            services[name] = _service(name, raw, plain["configs"], (ROOT / path).parent)
    return services


def _service(name: str, raw: Mapping[str, Any], configs: Mapping[str, Any], base: Path) -> Service:
    entrypoint = raw.get("entrypoint")
    volumes = [volume.split(":") for volume in raw.get("volumes", [])]
    return Service(
        name=name,
        image=raw["image"],
        profiles=tuple(raw.get("profiles", ())),
        words=(*(entrypoint or ()), *raw.get("command", ())),
        entrypoint=None if entrypoint is None else tuple(entrypoint),
        environment={key: str(value) for key, value in raw.get("environment", {}).items()},
        volumes={target: source for source, target, *_ in volumes if not source.startswith(".")},
        mounts={target: base / source for source, target, *_ in volumes if source.startswith(".")},
        files={row["target"]: configs[row["source"]]["content"] for row in raw.get("configs", [])},
        depends_on={
            other: (how["condition"], how.get("required", True))
            for other, how in raw.get("depends_on", {}).items()
        },
        raw=raw,
    )


def _interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(entry, variables) for key, entry in value.items()}
    if isinstance(value, list):
        return [_interpolated(entry, variables) for entry in value]
    if isinstance(value, str):
        return _VARIABLE.sub(lambda result: _value(result, variables), value)
    return value


def _value(result: re.Match[str], variables: Mapping[str, str]) -> str:
    if result[0] == "$$":
        return "$"
    return variables.get(result[1]) or result[2] or ""


class Containers:
    """Services of some profiles as processes with separate folders in `folder`. `hosts` maps
    `name:port` or other words to local ones. The caller runs brokers."""

    def __init__(
        self, folder: Path, services: Mapping[str, Service], hosts: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._services = services
        self._hosts = hosts
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.codes: dict[str, int] = {}
        """Exit codes of ended services."""

    def volume(self, source: str) -> Path:
        path = self._folder / "volumes" / source
        path.mkdir(parents=True, exist_ok=True)
        return path

    def log_text(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def run(self, limit_s: float) -> None:
        give_up_s = time.monotonic() + limit_s
        try:
            while len(self.codes) < len(self._services):
                assert time.monotonic() < give_up_s, f"still running: {sorted(self._running)}"
                for name, service in self._services.items():
                    if name not in self.codes and name not in self._running and self._may(service):
                        self._running[name] = self._start(service)
                self._collect()
                time.sleep(POLL_S)
        finally:
            for process in self._running.values():
                process.kill()
                process.wait()

    def _collect(self) -> None:
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[name]
                self.codes[name] = code
                assert code == 0, f"{name} ended with {code}:\n{self.log_text(name)}"

    def _may(self, service: Service) -> bool:
        for name, (condition, required) in service.depends_on.items():
            if condition == "service_healthy" and not required:
                continue  # a broker, or another profile
            assert condition == "service_completed_successfully", condition
            if self.codes.get(name) != 0:
                return False
        return True

    def _start(self, service: Service) -> subprocess.Popen[bytes]:
        words = service.words if service.entrypoint else ("dora-pipe", *service.words)
        home = self._folder / "containers" / service.name
        home.mkdir(parents=True)
        for target, content in service.files.items():
            (home / target[1:]).parent.mkdir(parents=True, exist_ok=True)
            (home / target[1:]).write_text(self._here(content, home))
        path = {"PATH": PATH, "HOME": str(home)}
        with (self._folder / f"{service.name}.log").open("ab") as log:
            return subprocess.Popen(
                [self._here(word, home) for word in words],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**path, **service.environment},
            )

    def _here(self, word: str, home: Path) -> str:
        everybody = self._services.values()
        mounted = [pair for service in everybody for pair in service.volumes.items()]
        places = {target: self.volume(source) for target, source in mounted}
        own = [
            str(PurePosixPath(target).parent) for service in everybody for target in service.files
        ]
        places |= {folder: home / folder[1:] for folder in (*own, "/tmp")}
        names = "|".join(map(re.escape, [*places, *self._hosts]))
        both = {**{k: str(v) for k, v in places.items()}, **self._hosts}
        return re.sub(rf"(?<![\w.])({names})(?![\w.-])", lambda result: both[result[1]], word)

"""Real Prometheus with the committed configuration, scraping an exporter."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support.kafka_broker import free_ports
from tests.support.tidy import ROOT

OBSERVE = ROOT / "infra/observe"
DASHBOARDS = sorted((OBSERVE / "dashboards").glob("*.json"))
START_S = 60.0
ANSWER_S = 60.0
TURN_S = 0.2
STARTS = 503
"""Status until Prometheus has replayed its log."""


def missing() -> str:
    if shutil.which("prometheus") and shutil.which("promtool"):
        return ""
    return "a real Prometheus needs Debian's package `prometheus`, not found on this machine"


class Prometheus:
    """Prometheus that scrapes `target` every second.

    Example: ``with Prometheus(folder, "127.0.0.1:9464"):``
    """

    def __init__(self, folder: Path, target: str) -> None:
        self._folder = folder
        config = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(OBSERVE / entry) for entry in config["rule_files"]]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._at = f"127.0.0.1:{free_ports(1)[0]}"

    def __enter__(self) -> Self:
        self._log = (self._folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={self._folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self._folder / 'tsdb'}",
                f"--web.listen-address={self._at}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def ask(self, path: str, **fields: str) -> Any:
        url = f"http://{self._at}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
                result = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == STARTS:
                    raise
                raise AssertionError(f"{fields}: {error.read().decode()}") from None
        assert result["status"] == "success", result
        return result["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return result

    def until(self, expr: str) -> None:
        late = time.monotonic() + START_S
        while time.monotonic() < late:
            assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
            try:
                if self.query(expr):
                    return
            except (urllib.error.URLError, ConnectionError):
                pass  # starting
            time.sleep(TURN_S)
        raise AssertionError(f"no sample of {expr!r} within {START_S} s")

"""`up` and `down`: the services of compose.yaml; decides which of them, and says where they are.

Everything is done by `docker compose` itself, with words that anybody may type instead. What it
needs is looked at first, each with a bound, so that what is missing is one line.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Final

from dora_pipe import __file__ as PACKAGE
from dora_pipe.bus import open_bus
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import BusError, ResourceError, UsageError

SINGLE: Final = "single"
CLUSTER: Final = "cluster"
OBSERVE: Final = "observe"
DEMO: Final = "demo"
KAFKA_UI: Final = "kafka-ui"
PROFILES: Final = (SINGLE, CLUSTER, OBSERVE, DEMO, KAFKA_UI)
"""Of infra/docker-compose.yml."""

BROKERS: Final = {SINGLE: ("kafka",), CLUSTER: ("kafka-1", "kafka-2", "kafka-3")}
"""Services of the two profiles that exclude each other: both are called `kafka` in there."""

COMPOSE_FILE: Final = "compose.yaml"
INCLUDED: Final = Path("infra") / "docker-compose.yml"

COMPOSE_MIN: Final = (2, 23, 1)
"""Configurations that stand in the file itself; services that need not be there."""

PROBE_LIMIT_S: Final = 20.0
"""Docker answers a question within this, or counts as absent."""

PAGES_LIMIT_S: Final = 120.0
"""What was started answers within this; downloads and builds come before and are not in it."""

LOOK_S: Final = 1.0
"""Between two looks."""

PAGE_LIMIT_S: Final = 5.0
"""One look at a page."""

RUN_VARIABLE: Final = "DORA_PIPE_RUN"
"""The run that is observed, as compose.yaml asks for it."""

LOOK_HINT: Final = "docker compose ps --all, docker compose logs SERVICE"
_INSTALL: Final = "install Docker with its compose plugin; `make kafka` starts a broker without it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Something that can be opened while its profile is up."""

    what: str
    where: str
    profile: str


PAGES: Final = (
    Page(what="broker", where="kafka://localhost:9092", profile=SINGLE),
    Page(
        what="brokers",
        where="kafka://localhost:29092,localhost:39092,localhost:49092",
        profile=CLUSTER,
    ),
    Page(what="dashboards (Grafana)", where="http://127.0.0.1:3000/", profile=OBSERVE),
    Page(what="alerts, queries (Prometheus)", where="http://127.0.0.1:9090/", profile=OBSERVE),
    Page(what="traces (Jaeger)", where="http://127.0.0.1:16686/", profile=OBSERVE),
    Page(what="metrics of the run", where="http://127.0.0.1:9464/metrics", profile=OBSERVE),
    Page(what="takes traces (OTLP)", where="http://127.0.0.1:4318", profile=OBSERVE),
    Page(what="topics and records (kafka-ui)", where="http://127.0.0.1:8080/", profile=KAFKA_UI),
)


# Decisions.


def profiles_of(*, cluster: bool, demo: bool, observe: bool, kafka_ui: bool) -> tuple[str, ...]:
    """The profiles that options mean, in the order of `PROFILES`."""
    wanted = {
        SINGLE: not cluster,
        CLUSTER: cluster,
        OBSERVE: observe,
        DEMO: demo,
        KAFKA_UI: kafka_ui,
    }
    return tuple(one for one in PROFILES if wanted[one])


def compose_words(file: Path, profiles: Sequence[str]) -> list[str]:
    """`docker compose` on that file; profiles that are named replace those of .env."""
    chosen = [word for one in profiles for word in ("--profile", one)]
    return ["docker", "compose", "--file", str(file), *chosen]


def refuse_clash(profiles: Sequence[str], running: Sequence[str]) -> None:
    """Raises UsageError if the brokers of the other profile are up: services would find both."""
    for profile, services in BROKERS.items():
        there = sorted(set(services) & set(running))
        if profile not in profiles and there:
            raise UsageError(
                f"{', '.join(there)} of profile {profile} is up; one broker or a cluster, not both",
                hint="dora-pipe down first; it keeps their data",
            )


def pages_of(profiles: Sequence[str]) -> list[Page]:
    """What can be opened then."""
    return [page for page in PAGES if page.profile in profiles]


def version_of(text: str) -> tuple[int, ...]:
    """Of a program; () where none is. Example: ``version_of("v2.39.1-desktop.1") == (2, 39, 1)``"""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


# Their surroundings.


def silent_of(pages: Sequence[Page], clock: Clock) -> list[Page]:
    """Those that have not answered when all have had `PAGES_LIMIT_S`."""
    give_up_ns = clock.now_ns() + int(PAGES_LIMIT_S * 1e9)
    silent = [page for page in pages if not answers(page)]
    while silent and clock.now_ns() < give_up_ns:
        clock.sleep(LOOK_S)
        silent = [page for page in silent if not answers(page)]
    return silent


def answers(page: Page) -> bool:
    """Whether somebody speaks there, whatever is said: an address that only takes refuses a GET."""
    if page.where.startswith("kafka://"):
        try:
            open_bus(page.where).close()
        except BusError:
            return False
        return True
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        directly.open(page.where, timeout=PAGE_LIMIT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except (OSError, HTTPException):
        return False
    return True


def compose_file() -> Path:
    """The one of the checkout this is called in, or is installed from. Raises UsageError."""
    for place in (Path.cwd(), Path(PACKAGE).resolve().parent):
        if (place / INCLUDED).is_file() and (place / COMPOSE_FILE).is_file():
            return place / COMPOSE_FILE
    raise UsageError(
        "there is no compose.yaml of dora-pipe here", hint="go into a checkout of its repository"
    )


def check_docker() -> None:
    """Raises ResourceError, one line on what is missing, unless Docker can be used."""
    if shutil.which("docker") is None:
        raise ResourceError("docker is not on this machine", hint=_INSTALL)
    plugin = _probe(["docker", "compose", "version", "--short"])
    if plugin.returncode:
        raise ResourceError("docker has no `compose` here", hint=_INSTALL)
    version = version_of(plugin.stdout)
    if version < COMPOSE_MIN:
        least = ".".join(map(str, COMPOSE_MIN))
        raise ResourceError(
            f"docker compose {plugin.stdout.strip() or 'of no version'} is too old",
            hint=f"compose.yaml needs {least} or later",
        )
    daemon = _probe(["docker", "version", "--format", "{{.Server.Version}}"])
    if daemon.returncode:
        said = (daemon.stderr or daemon.stdout).strip().splitlines() or ["it says nothing"]
        raise ResourceError(
            f"docker's daemon does not answer: {said[-1]}",
            hint="start it (systemctl start docker), and see whether this user may ask it",
        )


def _probe(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A question to docker, within its limit. Raises ResourceError beyond it."""
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"docker gives no answer within {PROBE_LIMIT_S:.0f} s", hint="is its daemon well?"
        ) from None
    except OSError as error:
        raise ResourceError(f"docker cannot be started: {error.strerror}", hint=_INSTALL) from None


def asked_of(words: Sequence[str]) -> str:
    """What docker prints. Raises ResourceError with what it complains of."""
    done = _probe(words)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it says nothing"]
        raise ResourceError(f"docker compose refuses: {said[-1]}")
    return done.stdout


def run_compose(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Let docker work as long as it takes; it says itself what it does. Raises ResourceError."""
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, env={**os.environ, **variables}, check=False
    )
    if done.returncode:
        raise ResourceError(
            f"docker compose ended with {done.returncode}",
            hint=f"what it said stands above; {LOOK_HINT}",
        )

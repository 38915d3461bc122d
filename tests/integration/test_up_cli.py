"""`up` and `down` with a `docker` that only writes down what it was asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dora_pipe.cli import up as under_test
from tests.support.command_line import Call
from tests.support.tidy import ROOT

DOCKER = """#!/bin/sh
printf '%s\\t%s\\n' "${DORA_PIPE_RUN:--}" "$*" >> @/asked
case "$*" in
"compose version --short") [ -f @/version ] && cat @/version ;;
"version --format {{.Server.Version}}") if [ -f @/daemon ]; then cat @/daemon; else
    echo 'Cannot connect to the Docker daemon. Is it running?' >&2; exit 1; fi ;;
*" ps --services") cat @/running ;;
*) [ ! -f @/fails ] || { echo 'pull access denied' >&2; exit 17; } ;;
esac
"""
FILE = f"--file {ROOT / 'compose.yaml'}"
OBSERVED = f"compose {FILE} --profile single --profile observe"


class Docker:
    """A program called `docker` that is all there is to be found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "docker"
        self.program.write_text(DOCKER.replace("@", str(folder)))
        self.program.chmod(0o755)
        self.has(version="2.39.1", daemon="28.2.2", running="")

    def has(self, **content: str) -> None:
        """What it answers with; `fails` makes it refuse to work."""
        for name, text in content.items():
            (self.folder / name).write_text(f"{text}\n")

    def asked(self) -> list[tuple[str, str]]:
        """(run that is observed, words) of what it was asked to do, questions left out."""
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [tuple(line.split("\t")) for line in lines]
        return [(run, words) for run, words in found if " up " in words or " down" in words]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    """All is well; pages are not asked."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("DORA_PIPE_RUN", raising=False)
    monkeypatch.setattr(under_test, "answers", lambda page: True)
    return Docker(tmp_path / "bin")


@pytest.mark.parametrize(
    ("options", "profiles", "run"),
    [
        ((), "--profile single --profile observe up --detach", "-"),
        (("--no-observe",), "--profile single up --detach", "-"),
        (("--cluster", "--build"), "--profile cluster --profile observe up --detach --build", "-"),
        (("--run", "mine"), "--profile single --profile observe up --detach", "mine"),
        (
            ("--demo", "--kafka-ui"),
            "--profile single --profile observe --profile demo --profile kafka-ui up --detach",
            "-",
        ),
    ],
)
def test_options_become_one_call_of_compose(
    call: Call, docker: Docker, options: tuple[str, ...], profiles: str, run: str
) -> None:
    code, out, err = call("up", *options)
    assert code == 0, err
    assert docker.asked() == [(run, f"compose {FILE} {profiles}")]
    assert ("http://127.0.0.1:3000/" in out) == ("observe" in profiles)
    assert ("http://127.0.0.1:8080/" in out) == ("kafka-ui" in profiles)
    assert ("localhost:29092" in out) == ("cluster" in profiles)


def test_down_names_every_profile_and_keeps_data_unless_it_is_told(
    call: Call, docker: Docker
) -> None:
    assert call("down")[0] == 0
    code, _, err = call("down", "--volumes")
    assert (code, err) == (0, "all data is deleted\n")
    profiles = " ".join(f"--profile {one}" for one in under_test.PROFILES)
    both = [words for _, words in docker.asked()]
    assert both == [f"compose {FILE} {profiles} down", f"compose {FILE} {profiles} down --volumes"]


@pytest.mark.parametrize(
    ("change", "words", "code", "line", "hint"),
    [
        ("no docker", ("up",), 7, "docker is not on this machine$", "make kafka"),
        ("no docker", ("down",), 7, "docker is not on this machine$", "make kafka"),
        ("no version", ("up",), 7, "docker has no `compose` here$", "plugin"),
        ("no version", ("down",), 7, "docker has no `compose` here$", "plugin"),
        ("old", ("up",), 7, r"docker compose 2\.17\.3 is too old$", r"2\.23\.1"),
        ("no daemon", ("up",), 7, "docker's daemon does not answer: Cannot connect to the Doc", ""),
        ("hangs", ("down",), 7, "docker gives no answer within 0 s$", ""),
        ("no program", ("up",), 7, "docker cannot be started: ", ""),
        ("", ("up", "--run", 'a"b'), 2, "--run 'a\"b' is no name of a run$", ""),
        (
            "broker",
            ("up", "--cluster"),
            2,
            "kafka of profile single is up; one broker or a cluster, not both$",
            "dora-pipe down first; it keeps their data$",
        ),
    ],
)
def test_what_is_missing_is_one_line_and_docker_is_not_asked_to_do_anything(
    call: Call,
    docker: Docker,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    words: tuple[str, ...],
    code: int,
    line: str,
    hint: str,
) -> None:
    monkeypatch.setattr(under_test, "PROBE_LIMIT_S", 0.2 if change == "hangs" else 20.0)
    match change:
        case "no docker":
            docker.program.unlink()
        case "no version" | "no daemon":
            (docker.folder / change.removeprefix("no ")).unlink()
        case "old":
            docker.has(version="2.17.3")
        case "hangs":
            docker.program.write_text("#!/bin/sh\nexec sleep 60\n")
        case "no program":
            docker.program.write_bytes(b"\x7fELF")
        case "broker":
            docker.has(running="kafka\ngrafana")
    found, out, err = call(*words)
    assert (found, out, docker.asked()) == (code, "", [])
    said, advice = err.splitlines()
    assert re.match(line, said.removeprefix("error: "))
    assert re.search(hint, advice.removeprefix("hint: "))


def test_the_same_kind_of_broker_may_be_up_already(call: Call, docker: Docker) -> None:
    docker.has(running="kafka\ngrafana")
    assert call("up")[0] == 0
    assert docker.asked() == [("-", f"{OBSERVED} up --detach")]


def test_compose_that_fails_has_said_why_itself(call: Call, docker: Docker) -> None:
    docker.has(fails="")
    code, _, err = call("up")
    line, hint = err.splitlines()
    assert (code, line) == (7, "error: docker compose ended with 17")
    assert "docker compose logs" in hint


def test_page_that_stays_silent_is_named(
    call: Call, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "PAGES_LIMIT_S", 0.0)
    monkeypatch.setattr(under_test, "answers", lambda page: "9090" not in page.where)
    code, out, err = call("up")
    assert code == 7
    assert "http://127.0.0.1:9090/" in out
    assert err.splitlines()[0] == "error: no answer within 0 s: http://127.0.0.1:9090/"

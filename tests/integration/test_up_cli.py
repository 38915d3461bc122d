"""`up` and `down` with a `docker` that only writes down what it was asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.cli import up as under_test
from tests.support.command_line import Call, caller
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
    monkeypatch.delenv("DORA_PIPE_RUN", raising=False)
    monkeypatch.setattr(under_test, "answers", lambda page: True)
    return Docker(tmp_path / "bin")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line."""
    monkeypatch.setenv("COLUMNS", "200")
    return caller(monkeypatch, capsys)


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


def _complaint(call: Call, *words: str) -> tuple[int, str, str]:
    """Exit code, line and hint; nothing else was said."""
    code, out, err = call(*words)
    assert out == ""
    line, hint = err.splitlines()
    return code, line.removeprefix("error: "), hint.removeprefix("hint: ")


@pytest.mark.parametrize("command", ["up", "down"])
def test_machine_without_docker_is_told_so(call: Call, docker: Docker, command: str) -> None:
    docker.program.unlink()
    code, line, hint = _complaint(call, command)
    assert (code, line) == (7, "docker is not on this machine")
    assert "make kafka" in hint


@pytest.mark.parametrize("command", ["up", "down"])
def test_docker_without_compose_is_told_so(call: Call, docker: Docker, command: str) -> None:
    (docker.folder / "version").unlink()
    code, line, hint = _complaint(call, command)
    assert (code, line) == (7, "docker has no `compose` here")
    assert "plugin" in hint
    assert docker.asked() == []


def test_compose_that_is_too_old_is_told_so(call: Call, docker: Docker) -> None:
    docker.has(version="2.17.3")
    code, line, hint = _complaint(call, "up")
    assert (code, line) == (7, "docker compose 2.17.3 is too old")
    assert "2.23.1" in hint


def test_daemon_that_does_not_answer_is_told_with_what_docker_says(
    call: Call, docker: Docker
) -> None:
    (docker.folder / "daemon").unlink()
    code, line, _ = _complaint(call, "up")
    assert code == 7
    assert line == (
        "docker's daemon does not answer: Cannot connect to the Docker daemon. Is it running?"
    )
    assert docker.asked() == []


def test_docker_that_hangs_is_not_waited_for(
    call: Call, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(under_test, "PROBE_LIMIT_S", 0.2)
    code, line, _ = _complaint(call, "down")
    assert (code, line) == (7, "docker gives no answer within 0 s")


def test_docker_that_is_no_program_is_told_so(call: Call, docker: Docker) -> None:
    docker.program.write_bytes(b"\x7fELF")
    code, line, _ = _complaint(call, "up")
    assert code == 7
    assert line.startswith("docker cannot be started: ")


def test_compose_that_fails_has_said_why_itself(call: Call, docker: Docker) -> None:
    docker.has(fails="")
    code, line, hint = _complaint(call, "up")
    assert (code, line) == (7, "docker compose ended with 17")
    assert "docker compose logs" in hint


def test_second_kind_of_broker_is_refused_while_the_first_is_up(call: Call, docker: Docker) -> None:
    docker.has(running="kafka\ngrafana")
    code, line, hint = _complaint(call, "up", "--cluster")
    assert (code, docker.asked()) == (2, [])
    assert line == "kafka of profile single is up; one broker or a cluster, not both"
    assert hint == "dora-pipe down first; it keeps their data"
    assert call("up")[0] == 0
    assert docker.asked() == [("-", f"{OBSERVED} up --detach")]


def test_name_that_no_run_has_is_refused_before_anything_starts(call: Call, docker: Docker) -> None:
    code, line, _ = _complaint(call, "up", "--run", 'a"b')
    assert (code, line) == (2, "--run 'a\"b' is no name of a run")
    assert docker.asked() == []


def test_page_that_stays_silent_is_named(
    call: Call, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "PAGES_LIMIT_S", 0.0)
    monkeypatch.setattr(under_test, "answers", lambda page: "9090" not in page.where)
    code, out, err = call("up")
    assert code == 7
    assert "http://127.0.0.1:9090/" in out
    assert err.splitlines()[0] == "error: no answer within 0 s: http://127.0.0.1:9090/"

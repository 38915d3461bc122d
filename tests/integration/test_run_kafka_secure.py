"""A run on a cluster that asks who comes: every role with exactly the rights the docs give it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.kafka.security import PASSWORD_VARIABLE
from dora_pipe.core.errors import AccessRefused
from dora_pipe.core.pure.records import Append, TopicPartition
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_secure import (
    ROLES,
    USERS,
    Certificates,
    allow,
    documented_rights,
    password_of,
    security_of,
)
from tests.support.user_run import WAIT_S, call, furnish, start, steps, until

pytest.importorskip("torch")
pytestmark = [pytest.mark.kafka, pytest.mark.slow]

STEPS = 3


@pytest.fixture
def directory(tmp_path: Path, secure_kafka: KafkaBroker, certificates: Certificates) -> Path:
    directory = furnish(tmp_path / "place")
    (tmp_path / "secrets").mkdir()
    for user in USERS:
        (tmp_path / "secrets" / user).write_text(password_of(user))
    with (directory / "config.toml").open("a") as config:
        config.write(
            f"""[bus]
url = "kafka://{secure_kafka.address("SECURE")}"
protocol = "SASL_SSL"
username = "nobody"
ca_file = "{certificates.path("ca.pem")}"
"""
        )
    return directory


def enters(path: Path, user: str) -> list[str]:
    file = path.parent / "secrets" / user
    return ["-o", f"bus.username={user}", "-o", f'bus.password_file="{file}"']


def said(directory: Path) -> str:
    path = directory / "said"
    return path.read_text() if path.exists() else ""


def test_each_role_does_its_work_with_exactly_the_rights_that_the_docs_give_it(
    directory: Path, secure_kafka: KafkaBroker, certificates: Certificates
) -> None:
    allow(secure_kafka, documented_rights("tiny"))
    orchestrator = start(
        directory, "orchestrator", "config.toml", *enters(directory, "orchestrator")
    )
    new_path = directory / "runs" / "tiny" / "config.toml"
    until(lambda: new_path.exists() or orchestrator.poll() is not None)
    assert orchestrator.poll() is None, said(directory)
    roles = [
        start(directory, "worker", "config.toml", "--name", name, *enters(directory, "worker"))
        for name in ("w0", "w1")
    ]
    roles.append(start(directory, "trainer", "config.toml", *enters(directory, "trainer")))
    ended = [role.wait(WAIT_S) for role in (orchestrator, *roles)]
    assert ended == [0, 0, 0, 0], said(directory)
    assert "lacks" not in said(directory)

    auditor = as_auditor(directory)
    assert steps(auditor, "tiny") == list(range(STEPS))
    for command in (
        ("audit", "tiny"),
        ("log", "topics", "tiny"),
        ("log", "read", "tiny", "decisions"),
    ):
        assert call(auditor, *command) == 0, said(auditor)
    assert call(auditor, "doctor", "--config", "runs/tiny") == 0, said(auditor)
    assert "as User:auditor by SASL_SSL" in said(auditor)
    assert "all 6 of run 'tiny'" in said(auditor)
    nobody_may_do_more(secure_kafka, certificates, directory)
    no_secret_is_anywhere(directory, auditor, secure_kafka)


def as_auditor(path: Path) -> Path:
    auditor = path.parent / "auditor"
    shutil.copytree(path, auditor, ignore=shutil.ignore_patterns("said"))
    config = auditor / "runs" / "tiny" / "config.toml"
    secrets = path.parent / "secrets"
    text = config.read_text().replace('username = "orchestrator"', 'username = "auditor"')
    text = text.replace(str(secrets / "orchestrator"), str(secrets / "auditor"))
    config.write_text(text.replace(f'"{path}', f'"{auditor}'))
    return auditor


FORBIDDEN = {
    "worker": ("decisions", "dead-letters"),
    "trainer": ("decisions", "trajectories", "progress"),
    "orchestrator": ("trajectories", "progress"),
    "auditor": ("control", "metrics", "decisions", "trajectories", "progress", "dead-letters"),
}


def nobody_may_do_more(secure_kafka: KafkaBroker, certificates: Certificates, path: Path) -> None:
    for user in ROLES:
        security = security_of(user, certificates, path.parent)
        bus = KafkaBus([secure_kafka.address("SECURE")], security=security)
        for name in FORBIDDEN[user]:
            topic = f"tiny.{name}"
            before = bus.end(TopicPartition(topic, 0))
            writer = bus.writer()
            with pytest.raises(AccessRefused, match=f"User:{user} lacks WRITE on topic {topic}"):
                writer.append([Append(topic=topic, value=b"{}")])
            assert bus.end(TopicPartition(topic, 0)) == before
        for other in {"orchestrator", "trainer"} - {user}:
            with pytest.raises(AccessRefused, match=f"transactional id tiny.{other}"):
                bus.writer(exclusive=f"tiny.{other}")
        bus.close()


def no_secret_is_anywhere(location: Path, auditor: Path, secure_kafka: KafkaBroker) -> None:
    secrets = [password_of(user).encode() for user in USERS]
    segments = (secure_kafka.folder / "data").glob("tiny.*/*.log")
    files = [path for root in (location, auditor) for path in root.rglob("*") if path.is_file()]
    looked = [*files, *segments]
    assert any(path.name == "said" for path in looked)
    assert any("tiny.control" in str(path) for path in looked)
    for path in looked:
        content = path.read_bytes()
        assert not any(secret in content for secret in secrets), path


def test_one_command_takes_the_password_from_the_environment_and_shows_it_nowhere(
    directory: Path, secure_kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, password_of("admin"))
    words = ("-o", "bus.username=admin", "-o", 'run.name="whole"', "-o", "run.steps=1")
    assert call(directory, "config", "config.toml", *words) == 0
    assert 'username = "admin"' in said(directory)
    assert call(directory, "run", "config.toml", *words) == 0, said(directory)
    assert call(directory, "audit", "whole") == 0, said(directory)
    for path in [*directory.rglob("*"), *(secure_kafka.folder / "data").glob("whole.*/*.log")]:
        assert path.is_dir() or password_of("admin").encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("case", "line", "hint"),
    [
        ("password", "refuses user `admin` by SCRAM-SHA-512", "bus.password_file"),
        ("certificate", "certificate has expired", "new certificate"),
        ("authority", "signed by an authority", "bus.ca_file"),
        ("right", "User:stranger lacks CREATE on topic", "kafka-acls.sh --bootstrap-server"),
    ],
)
def test_a_refusal_is_one_line_a_hint_and_an_exit_code(
    directory: Path,
    secure_kafka: KafkaBroker,
    certificates: Certificates,
    case: str,
    line: str,
    hint: str,
) -> None:
    words = {
        "password": ["-o", "bus.username=admin", *enters(directory, "worker")[2:]],
        "certificate": [
            *enters(directory, "admin"),
            *("-o", f"bus.url=kafka://{secure_kafka.address('EXPIRED')}"),
        ],
        "authority": [
            *enters(directory, "admin"),
            *("-o", f'bus.ca_file="{certificates.path("stranger-ca.pem")}"'),
        ],
        "right": enters(directory, "stranger"),
    }
    code = call(directory, "run", "config.toml", "-o", f'run.name="no-{case}"', *words[case])
    lines = said(directory).splitlines()
    assert code == 4, said(directory)
    (error,) = [line for line in lines if line.startswith("error: ")]
    assert line in error
    assert hint in lines[lines.index(error) + 1]
    assert "Traceback" not in said(directory)
    assert not (directory / "runs" / f"no-{case}" / "config.toml").exists(), "nothing is made"
    assert not any(password_of(user) in said(directory) for user in USERS)
    if case != "right":
        assert call(directory, "doctor", "--config", "config.toml", *words[case]) == 1
        assert line in said(directory).split(error)[1].replace("\n", " ")


def test_the_environment_of_these_tests_holds_no_password_itself() -> None:
    assert PASSWORD_VARIABLE not in os.environ

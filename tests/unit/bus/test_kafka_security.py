"""Tests of Kafka secrets from environment and files."""

from __future__ import annotations

import copy
import ssl
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.bus.kafka.client import client_settings
from dora_pipe.bus.kafka.security import (
    KEY_PASSWORD_VARIABLE,
    PASSWORD_VARIABLE,
    PLAINTEXT,
    SECRET_BYTES_MAX,
    KafkaSecurity,
)
from dora_pipe.config.model import Bus
from dora_pipe.core.errors import ConfigError
from tests.support.kafka_secure import Certificates

SECRET = "s3cret-9f1"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    monkeypatch.delenv(KEY_PASSWORD_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def user(password_file: str = "") -> KafkaSecurity:
    return KafkaSecurity(protocol="SASL_PLAINTEXT", username="w0", password_file=password_file)


def test_the_section_says_everything_but_the_secret() -> None:
    section = Bus(
        protocol="SASL_SSL",
        mechanism="PLAIN",
        username="w0",
        password_file="p",
        ca_file="ca",
        cert_file="c",
        key_file="k",
    )
    security = KafkaSecurity.of(section)
    for name in KafkaSecurity.__slots__:
        assert getattr(security, name) == getattr(section, name)
    assert security.tls and security.sasl and security.principal == "User:w0"


def test_without_anything_said_nobody_is_asked_and_nothing_encrypted() -> None:
    assert PLAINTEXT.client_settings() == {"security_protocol": "PLAINTEXT"}
    assert (PLAINTEXT.principal, PLAINTEXT.tls, PLAINTEXT.sasl) == ("User:ANONYMOUS", False, False)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_password_file_s_last_line_end_does_not_count(tmp_path: Path, end: str) -> None:
    file = tmp_path / "password"
    file.write_bytes(f" {SECRET}\n{end}".encode())
    settings = user(password_file=str(file)).client_settings()
    assert settings["sasl_plain_password"] == f" {SECRET}" + ("\n" if end else "")


def test_the_environment_goes_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text("other")
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    settings = user(password_file=str(file)).client_settings()
    assert settings == {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "w0",
        "sasl_plain_password": SECRET,
    }


def test_a_missing_password_names_the_variable_and_the_key() -> None:
    with pytest.raises(ConfigError, match="no password for the Kafka user `w0`") as refused:
        user().client_settings()
    assert PASSWORD_VARIABLE in (refused.value.hint or "")
    assert "bus.password_file" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (SECRET.encode() + b"\xff", "not UTF-8"),
        (SECRET.encode() * SECRET_BYTES_MAX, "too large"),
    ],
)
def test_a_useless_password_file_is_named_and_its_content_is_not(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=why) as refused:
        user(password_file=str(file)).client_settings()
    assert str(file) in refused.value.message
    assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_neither_repr_nor_str_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    security = user()
    assert client_settings(["h:1"], security)["sasl_plain_password"] == SECRET
    settings = client_settings(["h:1"], security)
    password = settings["sasl_plain_password"]
    shown = f"{security!r} {security} {settings} {password} {password!r} {password:>9}"
    assert SECRET not in f"{shown} {copy.deepcopy(settings)}"
    assert password.encode() == SECRET.encode() and "\0".join(["", password]) == f"\0{SECRET}"


def test_scram_escapes_what_means_something_to_it_and_plain_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    for mechanism, name in (("SCRAM-SHA-256", "a=3Db=2Cc"), ("PLAIN", "a=b,c")):
        security = KafkaSecurity(protocol="SASL_PLAINTEXT", mechanism=mechanism, username="a=b,c")
        assert security.client_settings()["sasl_plain_username"] == name


def test_tls_checks_brokers_and_their_names(certificates: Certificates) -> None:
    checked = KafkaSecurity(protocol="SSL", ca_file=certificates.path("ca.pem"))
    context = checked.client_settings()["ssl_context"]
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert len(context.get_ca_certs()) == 1


def test_a_client_s_certificate_may_lie_with_its_key_or_beside_it(
    certificates: Certificates,
) -> None:
    both, crt, key = map(certificates.path, ("client.pem", "client.crt", "client.key"))
    KafkaSecurity(protocol="SSL", cert_file=both).ssl_context()
    KafkaSecurity(protocol="SSL", cert_file=crt, key_file=key).ssl_context()
    with pytest.raises(ConfigError, match=r"bus\.cert_file and bus\.key_file"):
        KafkaSecurity(
            protocol="SSL", cert_file=crt, key_file=certificates.path("stranger.key")
        ).ssl_context()


def test_an_encrypted_key_is_opened_by_the_environment_and_never_asked_for(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates.encrypt("client.key", "locked.key", SECRET)
    security = KafkaSecurity(
        protocol="SSL",
        cert_file=certificates.path("client.crt"),
        key_file=certificates.path("locked.key"),
    )
    with pytest.raises(ConfigError) as refused:
        security.ssl_context()
    assert KEY_PASSWORD_VARIABLE in (refused.value.hint or "")
    monkeypatch.setenv(KEY_PASSWORD_VARIABLE, SECRET)
    security.ssl_context()


@pytest.mark.parametrize("key", ["ca_file", "cert_file", "key_file"])
def test_a_missing_or_senseless_file_is_named_with_its_key(
    tmp_path: Path, certificates: Certificates, key: str
) -> None:
    security = KafkaSecurity(
        protocol="SSL",
        cert_file=certificates.path("client.crt"),
        key_file=certificates.path("client.key"),
    )
    path, noise = tmp_path / "gone", tmp_path / "noise"
    noise.write_text("noise")
    for file, why in ((path, f"{key}: {path}: no such file"), (noise, f"{key}.*no PEM")):
        changed: dict[str, Any] = {key: str(file)}
        with pytest.raises(ConfigError, match=rf"bus\.{why}"):
            replace(security, **changed).ssl_context()

"""Kafka security: protocol, user, certificates.

Secrets are read for each new client; `KafkaSecurity` has none and may be printed.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dora_pipe.config.model import Bus as BusSection
from dora_pipe.core.errors import ConfigError

PASSWORD_VARIABLE = "DORA_PIPE_KAFKA_PASSWORD"
"""Overrides `bus.password_file`."""

KEY_PASSWORD_VARIABLE = "DORA_PIPE_KAFKA_KEY_PASSWORD"
"""Decrypts `bus.key_file`."""

SECRET_BYTES_MAX = 64 * 1024


class Secret(str):
    """String with a hidden repr: the client logs its settings."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"

    def __str__(self) -> str:
        return "<secret>"

    def __format__(self, spec: str) -> str:
        return "<secret>"


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSecurity:
    """Identity and trust of a client."""

    protocol: str = "PLAINTEXT"
    mechanism: str = "SCRAM-SHA-512"
    username: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    @classmethod
    def of(cls, bus: BusSection) -> KafkaSecurity:
        return cls(**{field.name: getattr(bus, field.name) for field in fields(cls)})

    @property
    def tls(self) -> bool:
        return self.protocol.endswith("SSL")

    @property
    def sasl(self) -> bool:
        return self.protocol.startswith("SASL_")

    @property
    def principal(self) -> str:
        """Return the principal for ACLs, as far as known."""
        if self.sasl:
            return f"User:{self.username}"
        return "this client's certificate" if self.cert_file else "User:ANONYMOUS"

    def client_settings(self) -> dict[str, Any]:
        """Return kafka-python's settings, secrets included: do not keep them.

        Raises ConfigError without any file content.
        """
        settings: dict[str, Any] = {"security_protocol": self.protocol}
        if self.tls:
            settings["ssl_context"] = self.ssl_context()
        if self.sasl:
            settings["sasl_mechanism"] = self.mechanism
            settings["sasl_plain_username"] = self._sasl_name()
            settings["sasl_plain_password"] = Secret(self._password())
        return settings

    def ssl_context(self) -> ssl.SSLContext:
        """Return a TLS 1.2+ context. Raises ConfigError naming the bad file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca_file:
            try:
                context.load_verify_locations(self.ca_file)
            except OSError as error:
                raise _unusable("ca_file", self.ca_file, error) from None
        else:
            context.load_default_certs()
        if self.cert_file:
            self._load_identity(context)
        return context

    def _load_identity(self, context: ssl.SSLContext) -> None:
        key = self.key_file or self.cert_file
        # Without a password OpenSSL would prompt on the terminal.
        password = os.environ.get(KEY_PASSWORD_VARIABLE, "")
        for name, path in (("cert_file", self.cert_file), ("key_file", key)):
            try:
                Path(path).open("rb").close()
            except OSError as error:
                raise _unusable(name, path, error) from None
        try:
            context.load_cert_chain(self.cert_file, key, password=lambda: password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"bus.cert_file and bus.key_file: {_why(error)}",
                hint=f"PEM files that belong together; {KEY_PASSWORD_VARIABLE} opens a "
                "key that is encrypted",
            ) from None

    def _sasl_name(self) -> str:
        """Escape commas and equals signs for SCRAM, not for PLAIN."""
        if self.mechanism == "PLAIN":
            return self.username
        return self.username.replace("=", "=3D").replace(",", "=2C")

    def _password(self) -> str:
        if password := os.environ.get(PASSWORD_VARIABLE, ""):
            return password
        if not self.password_file:
            raise ConfigError(
                f"no password for the Kafka user `{self.username}`",
                hint=f"set {PASSWORD_VARIABLE}, or bus.password_file to a file that holds it",
            )
        content = read_secret("bus.password_file", self.password_file)
        try:
            password = content.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            # The error quotes the bytes.
            raise ConfigError(f"bus.password_file: {self.password_file} is not UTF-8") from None
        if not password:
            raise ConfigError(f"bus.password_file: {self.password_file} is empty")
        return password


PLAINTEXT = KafkaSecurity()


def read_secret(key: str, path: str) -> bytes:
    """Return a file of at most `SECRET_BYTES_MAX`. Raises ConfigError, which names `key`."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {_why(error)}") from None
    if not 0 < len(content) <= SECRET_BYTES_MAX:
        raise ConfigError(f"{key}: {path} is {'too large' if content else 'empty'}")
    return content


def _unusable(key: str, path: str, error: OSError) -> ConfigError:
    return ConfigError(f"bus.{key}: {path}: {_why(error)}")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) or not isinstance(error, OSError):
        return "no PEM that can be read"
    return (error.strerror or type(error).__name__).lower()

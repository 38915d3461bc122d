"""Whether a broker can be reached and trusted: looked at by hand, as the client only says "no".

Decides what an unreachable cluster most likely means.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from contextlib import closing

from dora_pipe.bus.kafka_errors import untrusted
from dora_pipe.bus.kafka_security import KafkaSecurity
from dora_pipe.errors import AccessRefused, BusError

LOOK_LIMIT_S = 5.0
"""For one connection with its TLS handshake."""

ALERT_LIMIT_S = 0.5
"""TLS 1.3 tells a client that its certificate is refused only after the handshake."""


def check_tls(servers: Sequence[str], security: KafkaSecurity) -> None:
    """Refuse brokers whose certificates do not hold, before the client retries for long.

    Silent when one of the servers is trusted, and when none answers at all: the client tells that.
    Raises BusError, and ConfigError for a wrong file.
    """
    if not security.tls:
        return
    context = security.ssl_context()
    problem: BusError | None = None
    for server in servers:
        try:
            found = _handshake(server, context, security)
        except OSError:
            continue
        if found is None:
            return
        problem = found
    if problem is not None:
        raise problem


def speaks_tls(servers: Sequence[str]) -> bool:
    """Whether a listener answers a TLS handshake, trusted or not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for server in servers:
        host, port = split(server)
        try:
            with (
                closing(socket.create_connection((host, port), LOOK_LIMIT_S)) as plain,
                closing(context.wrap_socket(plain, server_hostname=host)),
            ):
                return True
        except (OSError, ValueError):
            continue
    return False


def unreachable(servers: Sequence[str], security: KafkaSecurity, why: str) -> BusError:
    """No broker answered: one line, with the likeliest reason."""
    where = ",".join(servers)
    if not security.tls and speaks_tls(servers):
        return BusError(
            f"the Kafka broker at {where} speaks TLS and bus.protocol is {security.protocol}",
            hint="set bus.protocol to SSL or SASL_SSL, and bus.ca_file",
        )
    hint = "is it running, and is bus.url right?"
    if _listens(servers):
        hint = (
            "something listens there: is it the listener for this protocol? "
            f"bus.protocol is {security.protocol}"
        )
    return BusError(f"no Kafka broker answers at {where}: {why}", hint=hint)


def split(server: str) -> tuple[str, int]:
    """Host and port. Raises BusError."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise BusError(f"`{server}` is no address of a broker", hint="kafka://HOST:PORT,...")
    return host.strip("[]"), int(port)


def _handshake(server: str, context: ssl.SSLContext, security: KafkaSecurity) -> BusError | None:
    """What is wrong with this broker's side of TLS, if anything."""
    host, port = split(server)
    with closing(socket.create_connection((host, port), LOOK_LIMIT_S)) as plain:
        try:
            with closing(context.wrap_socket(plain, server_hostname=host)) as wrapped:
                _await_alert(wrapped)
        except ssl.SSLCertVerificationError as error:
            return untrusted(str(error), security)
        except ssl.SSLError as error:
            return _refused(server, error, security)
        except (ConnectionError, EOFError):
            return BusError(
                f"the Kafka broker at {server} ends the TLS handshake",
                hint=f"is it the listener for bus.protocol {security.protocol}?",
            )
        except ValueError as error:
            return BusError(f"no TLS with {server}: {error}")
    return None


def _await_alert(wrapped: ssl.SSLSocket) -> None:
    """Only a client with a certificate of its own has one refused afterwards."""
    wrapped.settimeout(ALERT_LIMIT_S)
    try:
        wrapped.recv(1)
    except TimeoutError:
        return


def _refused(server: str, error: ssl.SSLError, security: KafkaSecurity) -> BusError:
    reason = error.reason or ""
    if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason:
        return AccessRefused(
            f"the Kafka listener at {server} speaks no TLS and bus.protocol is {security.protocol}",
            hint="set bus.protocol to PLAINTEXT or SASL_PLAINTEXT, or use its TLS listener's port",
        )
    if ("ALERT" in reason and "CERT" in reason) or "UNKNOWN_CA" in reason:
        return AccessRefused(
            f"the Kafka broker at {server} refuses this client's certificate: "
            f"{reason.replace('_', ' ').lower()}",
            hint="check bus.cert_file and bus.key_file against the brokers' trusted authorities",
        )
    return AccessRefused(
        f"no TLS with the Kafka broker at {server}: {reason or 'handshake failed'}"
    )


def _listens(servers: Sequence[str]) -> bool:
    for server in servers:
        try:
            socket.create_connection(split(server), LOOK_LIMIT_S).close()
        except OSError:
            continue
        return True
    return False

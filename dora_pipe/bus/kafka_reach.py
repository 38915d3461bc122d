"""Whether a cluster lets this client in: tried by hand once, as the client itself only times out.

Decides what a refusal most likely means. A knock is one connection: the TLS handshake, the SASL
handshake (which also tells a listener with passwords from one without) and the login.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import closing
from typing import Final

from kafka import errors as kafka_errors
from kafka.net.sasl import get_sasl_mechanism

from dora_pipe.bus.kafka_errors import not_known, untrusted
from dora_pipe.bus.kafka_security import KafkaSecurity
from dora_pipe.errors import AccessRefused, BusError

KNOCK_LIMIT_S: Final = 5.0
"""For each wait of one knock; a broker that is slower is left to the client's own patience."""

ANSWER_BYTES_MAX: Final = 1024 * 1024
CLIENT_ID: Final = b"dora-pipe"

_TIMEOUT_SIGN: Final = "Unable to bootstrap"

_SASL_HANDSHAKE, _SASL_AUTHENTICATE = 17, 36
_ILLEGAL_SASL_STATE = 34
_LOGIN_ROUNDS_MAX = 4


def knock(servers: Sequence[str], security: KafkaSecurity) -> None:
    """Raise AccessRefused where the brokers refuse this client, or cannot be trusted.

    Silent as soon as one server lets it in, and when none answers: a broker that hangs up may be
    one that ends just now, or a proxy before it, so that is left to the client's patience.
    Raises ConfigError for a missing secret or a wrong file.
    """
    settings = security.client_settings()
    problem: AccessRefused | None = None
    for server in servers:
        try:
            _knock(server, security, settings.get("ssl_context"), settings)
        except AccessRefused as refused:
            problem = refused
        except (OSError, EOFError):
            continue
        else:
            return
    if problem is not None:
        raise problem


def unreachable(servers: Sequence[str], security: KafkaSecurity, why: str) -> BusError:
    """No broker answered: one line, with the likeliest reason."""
    hint = "is it running, and is bus.url right?"
    if unknown := [server for server in servers if not _is_known(server)]:
        hosts = ", ".join(split(server)[0] for server in unknown)
        why = f"this machine knows no address of {hosts}"
        hint = "check the host in bus.url, and this machine's DNS or /etc/hosts"
    elif _listens(servers):
        hint = f"something listens there: is it a Kafka listener for {security.protocol}?"
    elif _TIMEOUT_SIGN in why:  # that it was waited for in vain is what the line says
        why = "nothing listens there"
    return BusError(f"no Kafka broker answers at {','.join(servers)}: {why}", hint=hint)


def check_advertised(brokers: Sequence[str]) -> None:
    """Raise BusError where the cluster sends its clients to hosts that none of them here knows.

    One broker of several may be away, and with it its name; that all are is somebody's mistake.
    """
    unknown = [broker for broker in brokers if not _is_known(broker)]
    if brokers and len(unknown) == len(brokers):
        raise BusError(
            f"the Kafka cluster sends clients to {', '.join(unknown)}, and this machine knows no "
            "address of that host",
            hint="make the name known here (DNS, /etc/hosts), or set the brokers' "
            "advertised.listeners to one that is",
        )


def split(server: str) -> tuple[str, int]:
    """Host and port. Raises BusError."""
    host, _, port = server.rpartition(":")
    try:
        host.encode("idna")  # as the resolver does, which would raise this error at its callers
    except UnicodeError:
        host = ""
    if not host or not port.isdigit() or int(port) > 65535:
        raise BusError(f"`{server}` is no address of a broker", hint="kafka://HOST:PORT,...")
    return host.strip("[]"), int(port)


def _knock(
    server: str,
    security: KafkaSecurity,
    context: ssl.SSLContext | None,
    settings: dict[str, object],
) -> None:
    host, port = split(server)
    with closing(socket.create_connection((host, port), KNOCK_LIMIT_S)) as plain:
        door: socket.socket = plain
        try:
            if context is not None:
                door = context.wrap_socket(plain, server_hostname=host)
            _enter(_Line(door), server, security, settings)
        except ssl.SSLCertVerificationError as error:
            raise untrusted(str(error), security) from error
        except (ssl.SSLError, EOFError, ConnectionError) as error:
            raise (_surely_wrong(server, error, security) or error) from None
        finally:
            door.close()


def _enter(line: _Line, server: str, security: KafkaSecurity, settings: dict[str, object]) -> None:
    """The SASL handshake, which a listener without SASL refuses, and the login where there is one.

    The order matters: no password leaves before the listener said that it takes its kind.
    """
    offered = line.sasl_handshake(security.mechanism if security.sasl else "PLAIN")
    if offered is None and security.sasl:
        raise AccessRefused(
            f"the Kafka listener at {server} asks for no password and bus.protocol is "
            f"{security.protocol}",
            hint="set bus.protocol to PLAINTEXT or SSL and drop bus.username, or use its SASL port",
        )
    if offered is not None and not security.sasl:
        raise AccessRefused(
            f"the Kafka listener at {server} asks for a user and bus.protocol is "
            f"{security.protocol}",
            hint=f"set bus.protocol to SASL_{'SSL' if security.tls else 'PLAINTEXT'}, "
            "bus.username and the password",
        )
    if offered is None:
        return
    if security.mechanism not in offered:
        raise AccessRefused(
            f"the Kafka listener at {server} offers {', '.join(offered)}, not {security.mechanism}",
            hint="set bus.mechanism to one that it offers",
        )
    _log_in(line, security, settings)


def _log_in(line: _Line, security: KafkaSecurity, settings: dict[str, object]) -> None:
    mechanism = get_sasl_mechanism(security.mechanism)(**settings)
    try:
        for _ in range(_LOGIN_ROUNDS_MAX):
            mechanism.receive(line.sasl_authenticate(mechanism.auth_bytes()))
            if mechanism.is_done():
                break
        if not mechanism.is_authenticated():
            raise _Refused
    except (_Refused, ValueError, KeyError) as error:
        refused = kafka_errors.SaslAuthenticationFailedError(str(error))
        raise not_known(refused, security) from None


class _Refused(Exception):
    """The broker does not take the login; its text may be anything."""


class _Line:
    """Asks and answers of Kafka's protocol, one after the other."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door

    def sasl_handshake(self, mechanism: str) -> list[str] | None:
        """The mechanisms that the listener offers; None where it has no SASL."""
        answer = self._ask(_SASL_HANDSHAKE, 1, _string(mechanism.encode()))
        code, count = struct.unpack_from(">hi", answer)
        if code == _ILLEGAL_SASL_STATE:
            return None
        names, at = [], 6
        for _ in range(max(0, count)):
            (size,) = struct.unpack_from(">h", answer, at)
            names.append(answer[at + 2 : at + 2 + size].decode())
            at += 2 + size
        return names

    def sasl_authenticate(self, token: bytes) -> bytes:
        """The broker's next token. Raises _Refused."""
        answer = self._ask(_SASL_AUTHENTICATE, 0, struct.pack(">i", len(token)) + token)
        code, size = struct.unpack_from(">hh", answer)
        at = 4 + max(0, size)
        if code:
            raise _Refused
        (size,) = struct.unpack_from(">i", answer, at)
        return answer[at + 4 : at + 4 + max(0, size)]

    def _ask(self, kind: int, version: int, body: bytes) -> bytes:
        """Send one request and return what follows the answer's correlation id."""
        request = struct.pack(">hhi", kind, version, kind) + _string(CLIENT_ID) + body
        self._door.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", self._read(4))
        if not 4 <= size <= ANSWER_BYTES_MAX:
            raise EOFError("not Kafka's protocol")
        return self._read(size)[4:]

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self._door.recv(size - len(found))
            if not part:
                raise EOFError("the connection was closed")
            found += part
        return found


def _string(text: bytes) -> bytes:
    return struct.pack(">h", len(text)) + text


def _surely_wrong(server: str, error: Exception, security: KafkaSecurity) -> AccessRefused | None:
    """What a closed door means, where no wait can mend it."""
    reason = (getattr(error, "reason", None) or "") if isinstance(error, ssl.SSLError) else ""
    if "ALERT" in reason and ("CERT" in reason or "CA" in reason.split("_")):
        return AccessRefused(
            f"the Kafka broker at {server} refuses this client's certificate: "
            f"{reason.replace('_', ' ').lower()}",
            hint="check bus.cert_file and bus.key_file against the authorities it trusts",
        )
    if security.tls and _speaks_plain(server):
        return AccessRefused(
            f"the Kafka listener at {server} speaks no TLS and bus.protocol is {security.protocol}",
            hint="use the port of its TLS listener, or set bus.protocol to one without SSL",
        )
    if not security.tls and _speaks_tls(server):
        return AccessRefused(
            f"the Kafka broker at {server} speaks TLS and bus.protocol is {security.protocol}",
            hint=f"set bus.protocol to {'SASL_SSL' if security.sasl else 'SSL or SASL_SSL'}, "
            "and bus.ca_file",
        )
    return None


def _speaks_plain(server: str) -> bool:
    """Whether a listener answers Kafka's protocol without TLS; no password is sent."""
    try:
        with closing(socket.create_connection(split(server), KNOCK_LIMIT_S)) as door:
            _Line(door).sasl_handshake("PLAIN")
    except (OSError, EOFError, ValueError, struct.error):
        return False
    return True


def _speaks_tls(server: str) -> bool:
    """Whether a listener answers a TLS handshake, trusted or not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    host, port = split(server)
    try:
        with (
            closing(socket.create_connection((host, port), KNOCK_LIMIT_S)) as plain,
            closing(context.wrap_socket(plain, server_hostname=host)),
        ):
            return True
    except (OSError, ValueError):
        return False


def _is_known(server: str) -> bool:
    """Whether its host has an address; a name service that is away just now decides nothing."""
    host, port = split(server)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return error.errno == socket.EAI_AGAIN
    return True


def _listens(servers: Sequence[str]) -> bool:
    for server in servers:
        try:
            socket.create_connection(split(server), KNOCK_LIMIT_S).close()
        except OSError:
            continue
        return True
    return False

"""Errors of Kafka's client as ours, with hints.

The client only times out when refused, so `probe` checks TLS, SASL, login and brokers by hand. It
splits a batch that is too large until one record is left.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

from kafka import errors as kafka_errors
from kafka.net.sasl import get_sasl_mechanism
from kafka.protocol.metadata import MetadataRequest, MetadataResponse
from kafka.protocol.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

from dora_pipe.bus.checks import record_bytes
from dora_pipe.bus.kafka.security import PASSWORD_VARIABLE, KafkaSecurity
from dora_pipe.core.errors import (
    AccessRefused,
    BusError,
    Fenced,
    LogTruncated,
    RecordRefused,
    RecordTooLarge,
    TopicMissing,
)
from dora_pipe.core.pure.records import Append

ROOM_HINT = "check the brokers and their disks with `dora-pipe why`"
QUOTA_HINT = (
    "kafka-configs.sh --describe --entity-type clients (and --entity-type users) lists quotas; "
    "raise or delete the one of this user or client"
)
ROLES_HINT = "docs/clusters.md lists the rights of each role"

FENCED = (kafka_errors.ProducerFencedError, kafka_errors.InvalidProducerEpochError)
_TRUNCATED = (kafka_errors.OffsetOutOfRangeError, kafka_errors.LogTruncationError)
_MISSING = (kafka_errors.UnknownTopicOrPartitionError, kafka_errors.UnknownTopicIdError)
_REFUSED = (
    kafka_errors.SaslAuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.IllegalSaslStateError,
)
TOO_LARGE: Final = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)
REFUSED: Final = (
    *TOO_LARGE,
    kafka_errors.InvalidTimestampError,
    kafka_errors.InvalidRecordError,
)
"""Errors that a retry cannot fix."""

_DISK_SIGNS = (
    (
        (kafka_errors.KafkaStorageError, kafka_errors.LogDirNotFoundError),
        "a broker's log directory has failed: its disk is full or broken",
    ),
    (
        (kafka_errors.NotEnoughReplicasError, kafka_errors.NotEnoughReplicasAfterAppendError),
        "fewer replicas are in sync than an append needs: brokers are down or their disks full",
    ),
    (
        (kafka_errors.LeaderNotAvailableError, kafka_errors.NotLeaderForPartitionError),
        "a partition has no leader: its broker is down or its disk full",
    ),
)
_ERROR_NAME = re.compile(r"\b[A-Z]\w+Error\b")
_THROTTLE_SIGN = "'throttle'"  # the client's reason for not sending
_CERTIFICATE_SIGN = "CERTIFICATE_VERIFY_FAILED"
_RANGE: Final = re.compile(r"Timestamp (-?\d+) .*within \[(-?\d+), ?(-?\d+)\]")
_MS_PER_H: Final = 3_600_000

PROBE_WAIT_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 1024 * 1024

_LOGIN_ROUNDS_MAX = 4


@contextmanager
def our_errors(
    otherwise: type[BusError] = BusError,
    *,
    security: KafkaSecurity | None = None,
    needs: str = "",
    servers: Sequence[str] = ("HOST:PORT",),
) -> Iterator[None]:
    """Convert the client's errors; `otherwise` is the class for unspecific ones.

    `needs` is the required right, e.g. ``WRITE on topic demo.control``; refusals name it and the
    command that grants it at `servers`.
    """
    try:
        yield
    except (kafka_errors.KafkaError, TimeoutError, ValueError) as error:
        raise _ours(cause_of(error), otherwise, security, needs, servers) from error


def _ours(
    error: Exception,
    otherwise: type[BusError],
    security: KafkaSecurity | None,
    needs: str,
    servers: Sequence[str],
) -> BusError:
    if isinstance(error, FENCED):
        return Fenced(f"a newer writer took over: {error}")
    if isinstance(error, _TRUNCATED):
        return LogTruncated(f"the log ends before this position: {error}")
    if isinstance(error, _MISSING):
        return TopicMissing(f"a topic is missing: {error}")
    if isinstance(error, kafka_errors.AuthorizationError):
        return not_allowed(error, security, needs, servers)
    if isinstance(error, _REFUSED):
        return not_known(error, security)
    if _CERTIFICATE_SIGN in str(error):
        return untrusted(str(error), security)
    text, hint = describe_error(error)
    return otherwise(f"kafka: {text}", hint=hint)


def cause_of(error: Exception) -> Exception:
    """Return the error that a follow-up error carries or quotes."""
    for argument in error.args:
        if isinstance(argument, kafka_errors.KafkaError):
            return cause_of(argument)
    if type(error) is kafka_errors.KafkaError:
        text = " ".join(map(str, error.args))
        for name in _ERROR_NAME.findall(text):
            kind = getattr(kafka_errors, name, kafka_errors.KafkaError)
            if kind is not kafka_errors.KafkaError:
                cause: Exception = kind(text)
                return cause
    return error


def describe_error(error: BaseException) -> tuple[str, str | None]:
    """Return an error's text and hint; after retries only a timeout is left."""
    for kinds, words in _DISK_SIGNS:
        if isinstance(error, kinds):
            return f"{words} ({type(error).__name__})", ROOM_HINT
    if _THROTTLE_SIGN in str(error) or isinstance(error, kafka_errors.ThrottlingQuotaExceededError):
        return f"a quota of the cluster delays this client ({type(error).__name__})", QUOTA_HINT
    late = isinstance(error, kafka_errors.KafkaTimeoutError)
    return one_line(error), ROOM_HINT if late else None


def one_line(error: BaseException) -> str:
    """Return an error's text, or its name without one."""
    return " ".join(str(error).split()) or type(error).__name__


def not_allowed(
    error: Exception, security: KafkaSecurity | None, needs: str, servers: Sequence[str]
) -> AccessRefused:
    """Return the error for a missing ACL."""
    who = security.principal if security else "this client"
    what = needs or f"a right on {_resource(error)}"
    operation, _, resource = needs.partition(" on ")
    hint = ROLES_HINT
    if resource and who.startswith("User:"):
        option = _acl_options(resource)
        words = operation.title().replace("_", "")
        options = f"--bootstrap-server {','.join(servers)} --command-config admin.properties"
        grant = f"--add --allow-principal {who} --operation {words} {option}"
        hint = f"kafka-acls.sh {options} {grant}; {hint}"
    return AccessRefused(f"the Kafka cluster refuses: {who} lacks {what}", hint=hint)


def not_known(error: kafka_errors.KafkaError, security: KafkaSecurity | None) -> AccessRefused:
    """Return the error for a failed login or an unsupported mechanism."""
    if isinstance(error, kafka_errors.SaslAuthenticationFailedError):
        name = f"`{security.username}` by {security.mechanism}" if security else "this client"
        return AccessRefused(
            f"the Kafka cluster refuses user {name}: wrong name or password",
            hint=f"check bus.username, and {PASSWORD_VARIABLE} or bus.password_file",
        )
    mechanism = security.mechanism if security else "this mechanism"
    return AccessRefused(
        f"the Kafka listener does not offer {mechanism}: {one_line(error)}",
        hint="check bus.mechanism and bus.protocol",
    )


def untrusted(why: str, security: KafkaSecurity | None) -> AccessRefused:
    """Return the error for an untrusted certificate."""
    ca_file = security.ca_file if security else ""
    trusted = f"the certificates of {ca_file}" if ca_file else "this machine's certificates"
    if "expired" in why:
        return AccessRefused(
            "the Kafka broker's certificate has expired",
            hint="the broker needs a new certificate (or this machine's clock is wrong)",
        )
    if "not yet valid" in why:
        return AccessRefused(
            "the Kafka broker's certificate is not valid yet",
            hint="compare this machine's clock with the broker's",
        )
    if "mismatch" in why or "not valid for" in why:
        return AccessRefused(
            f"the Kafka broker's certificate is for another host: {_after(why, 'failed: ')}",
            hint="connect by a name in the certificate",
        )
    return AccessRefused(
        f"the Kafka broker's certificate is signed by an authority missing from {trusted}: "
        f"{_after(why, 'failed: ')}",
        hint="set bus.ca_file to the PEM certificate of the authority that signs the brokers'",
    )


def _resource(error: Exception) -> str:
    named: Any = error.args[0] if error.args else ""
    names = sorted(map(str, named)) if isinstance(named, set | frozenset | list) else [str(named)]
    kinds = {
        kafka_errors.TopicAuthorizationFailedError: "topic",
        kafka_errors.TransactionalIdAuthorizationFailedError: "transactional id",
        kafka_errors.ClusterAuthorizationFailedError: "cluster",
    }
    kind = kinds.get(type(error), "a resource")
    return f"{kind} {', '.join(names)}".strip() if kind != "cluster" else "the cluster"


def _acl_options(resource: str) -> str:
    for kind, option in (("topic ", "--topic"), ("transactional id ", "--transactional-id")):
        if resource.startswith(kind):
            names = resource.removeprefix(kind).split(", ")
            return " ".join(f"{option} {name}" for name in names)
    return "--cluster"


def _after(text: str, sign: str) -> str:
    return text.rpartition(sign)[2].rpartition(" (_ssl")[0] or text.rpartition(sign)[2]


def refusal(
    error: Exception, record: Append, settings: Mapping[str, str], max_record_bytes: int
) -> RecordRefused:
    """Return the error; `settings` are the topic's current ones."""
    if isinstance(error, TOO_LARGE):
        return RecordTooLarge(
            f"the Kafka broker refuses a record of {record_bytes(record)} bytes for topic "
            f"{record.topic}, whose max.message.bytes is {settings['max.message.bytes']}",
            hint="raise together: the topic's max.message.bytes, and the brokers' "
            "replica.fetch.max.bytes; or lower bus.max_record_bytes for new runs",
            topic=record.topic,
            limit_bytes=max_record_bytes,
        )
    text = one_line(error)
    match = _RANGE.search(text)
    if match or isinstance(error, kafka_errors.InvalidTimestampError):
        how = _difference(match, settings) if match else f"differs from the broker's: {text}"
        return RecordRefused(
            f"the Kafka broker refuses a record for topic {record.topic} for its time: this "
            f"machine's clock {how}",
            hint="set the clocks of this machine and of the brokers (NTP), or set "
            f"message.timestamp.type=LogAppendTime for topic {record.topic}",
        )
    return RecordRefused(f"the Kafka broker refuses a record for topic {record.topic}: {text}")


def _difference(match: re.Match[str], settings: Mapping[str, str]) -> str:
    sent, first, last = map(int, match.groups())
    if sent > last:
        broker = last - int(settings.get("message.timestamp.after.max.ms", _MS_PER_H))
        return f"is {(sent - broker) / _MS_PER_H:.1f} h ahead of the broker's"
    broker = first + int(settings.get("message.timestamp.before.max.ms", _MS_PER_H))
    return f"is {(broker - sent) / _MS_PER_H:.1f} h slow compared with the broker's"


def probe(
    servers: Sequence[str], security: KafkaSecurity, wait_s: float | None = None
) -> list[str]:
    """Return the advertised brokers; empty if no server answers.

    Raises AccessRefused if all that answer refuse this client or are untrusted, ConfigError for
    a missing secret or bad file. A closed connection is no answer: the broker may be stopping.
    """
    settings = security.client_settings()
    problem: AccessRefused | None = None
    for server in servers:
        try:
            with _entered(server, security, settings, wait_s or PROBE_WAIT_S) as connection:
                request = MetadataRequest(version=1, topics=MetadataRequest.NO_TOPICS)
                answer = _ask(connection, request, MetadataResponse)
            return [f"{each.host}:{each.port}" for each in answer.brokers]
        except AccessRefused as refused:
            problem = refused
        except (OSError, EOFError):
            continue
    if problem is not None:
        raise problem
    return []


def unreachable(servers: Sequence[str], security: KafkaSecurity) -> BusError:
    """Return the error with the likeliest reason."""
    why = "connection refused"
    hint = "check bus.url, and that the broker runs (it exits if its disk is full)"
    if unknown := [server for server in servers if not _is_known(server)]:
        hosts = ", ".join(split(server)[0] for server in unknown)
        why = f"cannot resolve {hosts}"
        hint = "check the host in bus.url, and this machine's DNS or /etc/hosts"
    elif _listens(servers):
        why = "connected, but no answer"
        hint = f"check that it is a Kafka listener for {security.protocol} and its broker runs"
    return BusError(f"no Kafka broker answers at {','.join(servers)}: {why}", hint=hint)


def check_advertised(brokers: Sequence[str], servers: Sequence[str]) -> None:
    """Raises BusError if no advertised address answers, after one of `servers` has."""
    if set(brokers) & set(servers):
        return
    failures = []
    for broker in brokers:
        try:
            socket.create_connection(split(broker), PROBE_WAIT_S).close()
        except OSError as error:
            failures.append(f"{broker} ({error.strerror or error})")
        else:
            return
    if failures:
        raise BusError(
            f"the Kafka cluster answers at {','.join(servers)} and sends clients to "
            f"{', '.join(failures)}, which this machine cannot reach",
            hint="set the brokers' advertised.listeners to an address that this machine reaches, "
            "or make that one reachable (DNS, /etc/hosts, a port forward)",
        )


def split(server: str) -> tuple[str, int]:
    """Return host and port. Raises BusError."""
    host, _, port = server.rpartition(":")
    try:
        host.encode("idna")  # the resolver would raise this error later
    except UnicodeError:
        host = ""
    if not host or not port.isdigit() or int(port) > 65535:
        raise BusError(f"`{server}` is not a broker address", hint="kafka://HOST:PORT,...")
    return host.strip("[]"), int(port)


@contextmanager
def _entered(
    server: str, security: KafkaSecurity, settings: Mapping[str, Any], wait_s: float
) -> Iterator[socket.socket]:
    host, port = split(server)
    context: ssl.SSLContext | None = settings.get("ssl_context")
    with closing(socket.create_connection((host, port), wait_s)) as plain:
        connection: socket.socket = plain
        try:
            if context is not None:
                connection = context.wrap_socket(plain, server_hostname=host)
            _log_in_if_asked(connection, server, security, settings)
            yield connection
        except ssl.SSLCertVerificationError as error:
            raise untrusted(str(error), security) from error
        except (ssl.SSLError, EOFError, ConnectionError) as error:
            raise (_surely_wrong(server, error, security) or error) from None
        finally:
            connection.close()


def _log_in_if_asked(
    connection: socket.socket, server: str, security: KafkaSecurity, settings: Mapping[str, Any]
) -> None:
    """Log in if the listener uses SASL, only after it has confirmed the mechanism."""
    offered = _sasl_handshake(connection, security.mechanism if security.sasl else "PLAIN")
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
    _log_in(connection, security, settings)


def _log_in(
    connection: socket.socket, security: KafkaSecurity, settings: Mapping[str, Any]
) -> None:
    mechanism = get_sasl_mechanism(security.mechanism)(**settings)
    try:
        for _ in range(_LOGIN_ROUNDS_MAX):
            token = SaslAuthenticateRequest(version=0, auth_bytes=mechanism.auth_bytes())
            answer = _ask(connection, token, SaslAuthenticateResponse)
            if answer.error_code:
                break
            mechanism.receive(answer.auth_bytes or b"")
            if mechanism.is_done():
                break
        taken = not answer.error_code and mechanism.is_authenticated()
    except (ValueError, KeyError):
        taken = False
    if not taken:
        raise not_known(kafka_errors.SaslAuthenticationFailedError(), security)


def _sasl_handshake(connection: socket.socket, mechanism: str) -> list[str] | None:
    request = SaslHandshakeRequest(version=1, mechanism=mechanism)
    answer = _ask(connection, request, SaslHandshakeResponse)
    refused = answer.error_code == kafka_errors.IllegalSaslStateError.errno
    return None if refused else list(answer.mechanisms)


def _ask(connection: socket.socket, request: Any, kind: Any) -> Any:
    request.with_header(correlation_id=request.API_KEY, client_id="dora-pipe")
    connection.sendall(request.encode(framed=True, header=True))
    with connection.makefile("rb") as stream:
        size = int.from_bytes(stream.read(4))
        if not 4 <= size <= ANSWER_BYTES_MAX:
            raise EOFError("not Kafka's protocol")
        answer = stream.read(size)
    if len(answer) < size:
        raise EOFError("the connection was closed")
    try:
        return kind.decode(answer[4:], version=request.version)  # after the correlation id
    except (struct.error, ValueError) as error:
        raise EOFError(f"not Kafka's protocol: {error}") from error


def _surely_wrong(server: str, error: Exception, security: KafkaSecurity) -> AccessRefused | None:
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
    """Return whether a listener speaks Kafka's protocol without TLS; sends no password."""
    with (
        suppress(OSError, EOFError),
        closing(socket.create_connection(split(server), PROBE_WAIT_S)) as connection,
    ):
        _sasl_handshake(connection, "PLAIN")
        return True
    return False


def _speaks_tls(server: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        suppress(OSError, ValueError),
        closing(socket.create_connection(split(server), PROBE_WAIT_S)) as plain,
        closing(context.wrap_socket(plain, server_hostname=split(server)[0])),
    ):
        return True
    return False


def _is_known(server: str) -> bool:
    """Return whether the host resolves; True if the name service is down."""
    host, port = split(server)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return error.errno == socket.EAI_AGAIN
    return True


def _listens(servers: Sequence[str]) -> bool:
    for server in servers:
        with suppress(OSError):
            socket.create_connection(split(server), PROBE_WAIT_S).close()
            return True
    return False

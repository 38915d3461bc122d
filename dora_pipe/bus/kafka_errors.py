"""What kafka-python's errors mean here: which of ours, and what the user can do about it.

The client's own text is kept only where nothing better is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kafka import errors as kafka_errors

from dora_pipe.bus.kafka_security import PASSWORD_VARIABLE, KafkaSecurity
from dora_pipe.errors import (
    AccessRefused,
    BusError,
    Fenced,
    LogTruncated,
    RecordTooLarge,
    TopicMissing,
)

ROLES_HINT = "what each role needs stands in docs/kafka.md"

FENCED = (kafka_errors.ProducerFencedError, kafka_errors.InvalidProducerEpochError)
_TRUNCATED = (kafka_errors.OffsetOutOfRangeError, kafka_errors.LogTruncationError)
_MISSING = (kafka_errors.UnknownTopicOrPartitionError, kafka_errors.UnknownTopicIdError)
_TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)
_REFUSED = (
    kafka_errors.SaslAuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.IllegalSaslStateError,
)
_RIGHT_SIGN = "AuthorizationFailed"  # some refusals come as text in a nameless error
_CERTIFICATE_SIGN = "CERTIFICATE_VERIFY_FAILED"


@contextmanager
def our_errors(
    otherwise: type[BusError] = BusError,
    *,
    security: KafkaSecurity | None = None,
    needs: str = "",
    servers: Sequence[str] = ("HOST:PORT",),
) -> Iterator[None]:
    """Turn the client's errors into ours; `otherwise` is what an unspecific one means here.

    `needs` is the right that the call needs, e.g. ``WRITE on topic demo.control``: a refusal
    names it, with the principal of `security`, and the command that grants it at `servers`.
    """
    try:
        yield
    except FENCED as error:
        raise Fenced(f"a newer writer took over: {error}") from error
    except _TRUNCATED as error:
        raise LogTruncated(f"the log ends before this position: {error}") from error
    except _MISSING as error:
        raise TopicMissing(f"a topic is missing: {error}") from error
    except _TOO_LARGE as error:
        raise too_large(error) from error
    except kafka_errors.AuthorizationError as error:
        raise not_allowed(error, security, needs, servers) from error
    except _REFUSED as error:
        raise not_known(error, security) from error
    except (kafka_errors.KafkaError, TimeoutError, ValueError) as error:
        if _CERTIFICATE_SIGN in str(error):
            raise untrusted(str(error), security) from error
        if _RIGHT_SIGN in str(error):
            raise not_allowed(error, security, needs, servers) from error
        raise otherwise(f"kafka: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error's text, or its name where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def not_allowed(
    error: Exception, security: KafkaSecurity | None, needs: str, servers: Sequence[str]
) -> AccessRefused:
    """A missing ACL: who lacks which operation on what."""
    who = security.principal if security else "this client"
    what = needs or f"a right on {_resource(error)}"
    operation, _, resource = needs.partition(" on ")
    hint = ROLES_HINT
    if resource and who.startswith("User:"):
        option = _acl_options(resource)
        words = operation.title().replace("_", "")
        place = f"--bootstrap-server {','.join(servers)} --command-config admin.properties"
        grant = f"--add --allow-principal {who} --operation {words} {option}"
        hint = f"kafka-acls.sh {place} {grant}; {hint}"
    return AccessRefused(f"the Kafka cluster refuses: {who} lacks {what}", hint=hint)


def not_known(error: kafka_errors.KafkaError, security: KafkaSecurity | None) -> AccessRefused:
    """A refused login, or a mechanism that the listener does not offer."""
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
    """A certificate that does not hold, with what to do about it."""
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
            hint="connect by a name in the certificate, or set bus.check_hostname = false",
        )
    return AccessRefused(
        f"the Kafka broker's certificate is signed by an authority that {trusted} do not hold: "
        f"{_after(why, 'failed: ')}",
        hint="set bus.ca_file to the PEM certificate of the authority that signs the brokers'",
    )


def too_large(error: BaseException) -> RecordTooLarge:
    """The broker's own limit is below the topic's."""
    return RecordTooLarge(
        f"the Kafka broker takes no record so large: {one_line(error)}",
        hint="raise together: the topic's max.message.bytes, and the brokers' "
        "replica.fetch.max.bytes; or lower bus.record_bytes_max for new runs",
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
    """What names a resource for kafka-acls, e.g. ``--topic a --topic b`` of ``topic a, b``."""
    for kind, option in (("topic ", "--topic"), ("transactional id ", "--transactional-id")):
        if resource.startswith(kind):
            names = resource.removeprefix(kind).split(", ")
            return " ".join(f"{option} {name}" for name in names)
    return "--cluster"


def _after(text: str, sign: str) -> str:
    """OpenSSL's reason without its prefix and its place in the source."""
    return text.rpartition(sign)[2].rpartition(" (_ssl")[0] or text.rpartition(sign)[2]

"""Tests of Kafka error mapping and messages."""

from __future__ import annotations

import pytest
from kafka import errors as kafka_errors

from dora_pipe.bus.kafka.access import ROOM_HINT, cause_of, our_errors, refusal
from dora_pipe.bus.kafka.security import KafkaSecurity
from dora_pipe.core.errors import (
    AccessRefused,
    BusError,
    DoraError,
    Fenced,
    LogTruncated,
    OutcomeUnknown,
    TopicMissing,
)
from dora_pipe.core.loop.retry import FINAL_ERRORS
from dora_pipe.core.pure.records import Append

WORKER = KafkaSecurity(protocol="SASL_SSL", username="w0", ca_file="ca.pem")


def refused(error: Exception, *, needs: str = "", security: KafkaSecurity = WORKER) -> BusError:
    with (
        pytest.raises(BusError) as raised,
        our_errors(security=security, needs=needs, servers=["k.example:9094"]),
    ):
        raise error
    assert "\n" not in raised.value.message and "\n" not in (raised.value.hint or "")
    return raised.value


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (kafka_errors.ProducerFencedError(), Fenced),
        (kafka_errors.InvalidProducerEpochError(), Fenced),
        (kafka_errors.OffsetOutOfRangeError({}), LogTruncated),
        (kafka_errors.LogTruncationError({}), LogTruncated),
        (kafka_errors.UnknownTopicOrPartitionError(), TopicMissing),
        (kafka_errors.KafkaTimeoutError("slow"), BusError),
        (kafka_errors.KafkaConnectionError("gone"), BusError),
        (TimeoutError("slow"), BusError),
    ],
)
def test_each_error_of_the_client_has_one_meaning(theirs: Exception, ours: type[DoraError]) -> None:
    with pytest.raises(BusError) as raised, our_errors():
        raise theirs
    assert type(raised.value) is ours
    assert "\n" not in raised.value.message


def test_what_is_unspecific_in_a_commit_is_an_unknown_outcome_and_fencing_is_not() -> None:
    with pytest.raises(OutcomeUnknown), our_errors(OutcomeUnknown):
        raise kafka_errors.KafkaTimeoutError("slow")
    with pytest.raises(Fenced), our_errors(OutcomeUnknown):
        raise kafka_errors.ProducerFencedError


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (kafka_errors.KafkaStorageError, "a broker's log directory has failed"),
        (kafka_errors.NotEnoughReplicasError, "fewer replicas are in sync than an append needs"),
        (kafka_errors.LeaderNotAvailableError, "a partition has no leader"),
        (kafka_errors.KafkaTimeoutError, "KafkaTimeoutError"),
    ],
)
def test_error_of_an_append_names_the_cause_as_far_as_a_client_sees_it(
    kind: type[Exception], words: str
) -> None:
    with pytest.raises(OutcomeUnknown, match=words) as raised, our_errors(OutcomeUnknown):
        raise kind
    assert raised.value.hint == ROOM_HINT


@pytest.mark.parametrize(
    "theirs",
    [
        kafka_errors.NodeNotReadyError("Node paused: {'throttle'}"),
        kafka_errors.ThrottlingQuotaExceededError(),
    ],
)
def test_a_quota_is_named(theirs: Exception) -> None:
    error = refused(theirs)
    assert "a quota of the cluster delays this client" in error.message
    assert "--entity-type clients" in (error.hint or "")


def test_a_missing_right_names_principal_operation_and_resource() -> None:
    error = refused(
        kafka_errors.TopicAuthorizationFailedError("r.decisions"),
        needs="WRITE on topic r.decisions",
    )
    assert isinstance(error, AccessRefused)
    assert error.message == ("the Kafka cluster refuses: User:w0 lacks WRITE on topic r.decisions")
    assert error.hint is not None
    assert error.hint.startswith(
        "kafka-acls.sh --bootstrap-server k.example:9094 --command-config admin.properties "
        "--add --allow-principal User:w0 --operation Write --topic r.decisions;"
    )


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ("DESCRIBE_CONFIGS on topic a, b", "--operation DescribeConfigs --topic a --topic b"),
        ("WRITE on transactional id r.t", "--operation Write --transactional-id r.t"),
        ("DESCRIBE on the cluster", "--operation Describe --cluster"),
    ],
)
def test_the_hint_is_a_command_that_grants_it(needs: str, words: str) -> None:
    error = refused(kafka_errors.ClusterAuthorizationFailedError(), needs=needs)
    assert f"{words};" in (error.hint or "")


def test_a_right_that_nobody_named_is_named_by_the_client_s_error() -> None:
    error = refused(kafka_errors.TopicAuthorizationFailedError({"b", "a"}))
    assert "a right on topic a, b" in error.message


def test_a_refusal_hidden_in_a_nameless_error_is_found() -> None:
    hidden = kafka_errors.KafkaError("Unexpected error: [Error 31] ClusterAuthorizationFailedError")
    assert isinstance(refused(hidden, needs="WRITE on topic t"), AccessRefused)


@pytest.mark.parametrize(
    ("cause", "ours"),
    [
        (kafka_errors.ProducerFencedError(), Fenced),
        (kafka_errors.InvalidProducerEpochError(), Fenced),
        (kafka_errors.TransactionalIdAuthorizationFailedError("t"), AccessRefused),
        (kafka_errors.TopicAuthorizationFailedError({"t"}), AccessRefused),
        (kafka_errors.UnknownTopicOrPartitionError(), TopicMissing),
    ],
)
def test_the_cause_of_a_follow_up_error_decides(cause: Exception, ours: type[DoraError]) -> None:
    for follow_up in (
        kafka_errors.KafkaError("Cannot perform send because of errors.", cause),
        kafka_errors.KafkaError(f"Cannot execute: we are in an error state: {cause}"),
        kafka_errors.KafkaError(f"Could not add partitions due to errors: {{0: {cause!r}}}"),
    ):
        with pytest.raises(ours), our_errors(OutcomeUnknown):
            raise follow_up


@pytest.mark.parametrize(
    "error", [kafka_errors.KafkaError("no names"), kafka_errors.KafkaConnectionError(OSError(9))]
)
def test_an_error_that_follows_none_is_its_own_cause(error: Exception) -> None:
    assert cause_of(error) is error


def test_a_certificate_refused_in_the_middle_of_a_run_says_why() -> None:
    text = "Handshake failed: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
    expired = kafka_errors.KafkaConnectionError(f"{text}certificate has expired (_ssl.c:1006)")
    assert "expired" in refused(expired).message
    unknown = kafka_errors.KafkaConnectionError(f"{text}unable to get local issuer (_ssl.c:1006)")
    error = refused(unknown)
    assert "ca.pem" in error.message and "bus.ca_file" in (error.hint or "")
    assert "_ssl.c" not in error.message


def test_a_clock_that_is_wrong_is_thought_of() -> None:
    early = kafka_errors.KafkaConnectionError(
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not yet valid"
    )
    assert "clock" in (refused(early).hint or "")


def test_a_refused_login_does_not_repeat_what_the_broker_said_of_it() -> None:
    error = refused(kafka_errors.SaslAuthenticationFailedError("for user w0 with s3cret"))
    assert "s3cret" not in f"{error.message}{error.hint}"
    assert "`w0` by SCRAM-SHA-512" in error.message


@pytest.mark.parametrize(
    ("theirs", "words", "hint"),
    [
        (
            kafka_errors.MessageSizeTooLargeError("9 bytes"),
            "a record of 3 bytes for topic r.t, whose max.message.bytes is 2",
            "max.message.bytes, and the brokers' replica.fetch.max.bytes",
        ),
        (
            kafka_errors.InvalidRecordError(
                "Timestamp 7200000 of message with offset 0 is out of range. "
                "The timestamp should be within [-9, 3600000]."
            ),
            "this machine's clock is 2.0 h ahead of the broker's",
            "message.timestamp.type=LogAppendTime",
        ),
        (
            kafka_errors.InvalidTimestampError(
                "Timestamp 0 of message with offset 0 is out of range. "
                "The timestamp should be within [3600000, 9900000]."
            ),
            "this machine's clock is 2.0 h slow compared with the broker's",
            "NTP",
        ),
        (kafka_errors.InvalidTimestampError("late"), "differs from the broker's: ", "NTP"),
        (kafka_errors.InvalidRecordError("no key"), "for topic r.t: [Error 87]", ""),
    ],
)
def test_a_refused_record_is_named_with_the_cause(theirs: Exception, words: str, hint: str) -> None:
    error = refusal(theirs, Append(topic="r.t", value=b"abc"), {"max.message.bytes": "2"}, 1)
    assert words in error.message
    assert hint in (error.hint or "")
    assert isinstance(error, FINAL_ERRORS) and error.waited_out


def test_no_wait_mends_a_refusal_so_it_is_no_unknown_outcome() -> None:
    with pytest.raises(AccessRefused), our_errors(OutcomeUnknown, needs="WRITE on topic t"):
        raise kafka_errors.TopicAuthorizationFailedError("t")
    assert AccessRefused in FINAL_ERRORS

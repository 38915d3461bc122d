"""The broker that the tests stand on starts, forgets nothing it acknowledged, and comes back."""

import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewTopic

from infra.kafka import broker as broker_module
from infra.kafka.broker import HOST, LOWEST_PORT, new_cluster
from tests.support.kafka_broker import BrokerError, KafkaBroker, free_ports, values_of

pytestmark = pytest.mark.kafka


LOWEST_OF_SYSTEM = 20_000
"""Of the ports for connections going out; machines differ."""


@pytest.fixture
def leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the system give ports from one on to connections going out."""

    def leave(lowest: int) -> None:
        told = tmp_path / "ip_local_port_range"
        told.write_text(f"{lowest}\t65535\n")
        monkeypatch.setattr(broker_module, "PORT_RANGE", told)

    return leave


def test_free_ports_lie_in_a_row_below_those_of_connections_going_out(
    leaves: Callable[[int], None],
) -> None:
    leaves(LOWEST_OF_SYSTEM)
    drawn = [free_ports(5) for _ in range(100)]
    assert all(ports == list(range(ports[0], ports[0] + 5)) for ports in drawn)
    assert LOWEST_PORT <= min(min(drawn)) <= max(max(drawn)) < LOWEST_OF_SYSTEM


def test_a_port_that_somebody_has_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(4)[0]
    starts = iter([first, first + 2])
    monkeypatch.setattr(secrets, "choice", lambda _: next(starts))
    with socket.create_server((HOST, first + 1)):
        assert free_ports(2) == [first + 2, first + 3]


@pytest.mark.parametrize("lowest", [1024, LOWEST_PORT, LOWEST_PORT + 2])
def test_where_the_system_leaves_no_room_ports_are_any(
    leaves: Callable[[int], None], lowest: int
) -> None:
    leaves(lowest)
    drawn = [free_ports(3) for _ in range(20)]
    assert all(ports[0] >= LOWEST_PORT and ports[-1] < 65_536 for ports in drawn)
    assert max(max(drawn)) > LOWEST_PORT + 1_000


def test_without_a_free_port_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "_free", lambda port: False)
    with pytest.raises(BrokerError, match="no 2 free ports in a row between 10000 and "):
        free_ports(2)


@pytest.mark.slow
def test_broker_keeps_what_it_acknowledged_when_it_is_killed_and_started_again(
    tmp_path: Path,
) -> None:
    with KafkaBroker(tmp_path) as broker:
        address = broker.bootstrap
        admin = KafkaAdminClient(bootstrap_servers=address)
        admin.create_topics([NewTopic("kept", 1, 1)])
        admin.close()
        producer = KafkaProducer(bootstrap_servers=address, acks="all")
        producer.send("kept", b"one").get(timeout=20)
        producer.close()
        broker.kill()
        broker.start()
        assert broker.bootstrap == address
        assert values_of(address, "kept", 1) == [b"one"]
        broker.stop()
        assert not broker.log().count("ERROR"), broker.log()


def test_a_cluster_id_never_looks_like_an_option() -> None:
    ids = {new_cluster() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(one) for one in ids} == {22}
    assert not [one for one in ids if one.startswith("-")]

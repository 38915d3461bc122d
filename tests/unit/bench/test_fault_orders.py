"""Tests of fault orders: coverage in 30 rounds, determinism by seed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.kill_rounds.order import (
    BROKER,
    BROKER_AGAIN_S_MAX,
    DOWN_S_MAX,
    INSIDE,
    KINDS,
    PARTITIONS,
    ROLE_KINDS,
    WORKERS,
    Chance,
    Order,
    Point,
    order_of,
)

RECORDS = 100


def _series(seed: int = 0, rounds: int = 30) -> list[Order]:
    return [order_of(seed, number, control_facts=RECORDS) for number in range(rounds)]


def _kind(order: Order) -> str:
    return "worker" if order.role in WORKERS else order.role


def test_thirty_rounds_strike_every_role_ten_times_four_of_them_at_random() -> None:
    orders = _series()
    assert Counter(map(_kind, orders)) == dict.fromkeys(ROLE_KINDS, 10)
    chances = [(_kind(order), order.at) for order in orders if isinstance(order.at, Chance)]
    assert Counter(kind for kind, _ in chances) == dict.fromkeys(ROLE_KINDS, 4)
    twice = Counter(kind for kind, chance in chances if chance.again_s is not None)
    assert twice == dict.fromkeys(ROLE_KINDS, 2)


@pytest.mark.parametrize(
    ("kind", "moment", "what"),
    [
        ("worker", "middle", "trajectory"),
        ("worker", "after", "trajectory"),
        ("worker", "middle", "trajectories-logged"),
        ("trainer", "middle", "step-committed"),
        ("trainer", "before", "step-committed"),
        ("trainer", "named", "weights"),
        ("trainer", "after", "step-committed"),
        ("orchestrator", "middle", "round"),
        ("orchestrator", "before", "round"),
        ("orchestrator", "middle", "take-batch"),
    ],
)
def test_thirty_rounds_of_any_seed_hold_the_moments_that_matter(
    kind: str, moment: str, what: str
) -> None:
    for seed in range(5):
        points = [entry.at for entry in _series(seed) if _kind(entry) == kind]
        met = {(point.moment, point.what) for point in points if isinstance(point, Point)}
        assert (moment, what) in met


def test_on_kafka_the_broker_is_struck_in_turn_with_the_roles_at_random_moments() -> None:
    orders = [order_of(0, index, control_facts=RECORDS, kinds=KINDS) for index in range(100)]
    assert Counter(map(_kind, orders)) == dict.fromkeys(KINDS, 25)
    brokers = [order for order in orders if order.role == BROKER]
    moments = [broker.at for broker in brokers if isinstance(broker.at, Chance)]
    assert len(moments) == 25
    assert sum(moment.again_s is not None for moment in moments) == 5
    assert all(0 <= (moment.again_s or 0.0) <= BROKER_AGAIN_S_MAX for moment in moments)
    assert all(1 <= moment.control <= RECORDS * 4 // 5 for moment in moments)
    assert all(0 <= broker.down_s <= DOWN_S_MAX for broker in brokers)
    topics = {broker.leads[0] for broker in brokers}
    assert {"trajectories", "progress"} <= topics
    assert topics <= {"trajectories", "progress", "control", "decisions", "metrics"}
    assert all(0 <= broker.leads[1] < PARTITIONS for broker in brokers)
    assert order_of(0, 3, control_facts=RECORDS, kinds=KINDS) == orders[3]


def test_roles_that_stay_dead_are_struck_inside_their_appends_each_kind_at_all_that_matter() -> (
    None
):
    orders = [order_of(0, index, control_facts=RECORDS, dead_s=10.0) for index in range(30)]
    assert Counter(map(_kind, orders)) == dict.fromkeys(ROLE_KINDS, 10)
    assert all(order.stays_dead and order.down_s == 10.0 for order in orders)
    points = [(_kind(order), order.at) for order in orders]
    met = {(kind, point.moment, point.what) for kind, point in points if isinstance(point, Point)}
    assert met == {(kind, *aim[:2]) for kind, aims in INSIDE.items() for aim in aims}
    assert {moment for _, moment, _ in met} == {"middle"}
    broker = order_of(0, 3, control_facts=RECORDS, kinds=KINDS)
    assert not any(entry.stays_dead for entry in (*_series(), broker))

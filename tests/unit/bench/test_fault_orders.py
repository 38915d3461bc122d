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
    chances = [(_kind(one), one.at) for one in orders if isinstance(one.at, Chance)]
    assert Counter(kind for kind, _ in chances) == dict.fromkeys(ROLE_KINDS, 4)
    twice = Counter(kind for kind, at in chances if at.again_s is not None)
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
        points = [one.at for one in _series(seed) if _kind(one) == kind]
        met = {(at.moment, at.what) for at in points if isinstance(at, Point)}
        assert (moment, what) in met


def test_on_kafka_the_broker_is_struck_in_turn_with_the_roles_at_random_moments() -> None:
    orders = [order_of(0, at, control_facts=RECORDS, kinds=KINDS) for at in range(100)]
    assert Counter(map(_kind, orders)) == dict.fromkeys(KINDS, 25)
    brokers = [one for one in orders if one.role == BROKER]
    moments = [one.at for one in brokers if isinstance(one.at, Chance)]
    assert len(moments) == 25
    assert sum(at.again_s is not None for at in moments) == 5
    assert all(0 <= (at.again_s or 0.0) <= BROKER_AGAIN_S_MAX for at in moments)
    assert all(1 <= at.control <= RECORDS * 4 // 5 for at in moments)
    assert all(0 <= one.down_s <= DOWN_S_MAX for one in brokers)
    topics = {one.leads[0] for one in brokers}
    assert {"trajectories", "progress"} <= topics
    assert topics <= {"trajectories", "progress", "control", "decisions", "metrics"}
    assert all(0 <= one.leads[1] < PARTITIONS for one in brokers)
    assert order_of(0, 3, control_facts=RECORDS, kinds=KINDS) == orders[3]


def test_roles_that_stay_dead_are_struck_inside_their_appends_each_kind_at_all_that_matter() -> (
    None
):
    orders = [order_of(0, at, control_facts=RECORDS, dead_s=10.0) for at in range(30)]
    assert Counter(map(_kind, orders)) == dict.fromkeys(ROLE_KINDS, 10)
    assert all(one.stays_dead and one.down_s == 10.0 for one in orders)
    points = [(_kind(one), one.at) for one in orders]
    met = {(kind, at.moment, at.what) for kind, at in points if isinstance(at, Point)}
    assert met == {(kind, *aim[:2]) for kind, aims in INSIDE.items() for aim in aims}
    assert {moment for _, moment, _ in met} == {"middle"}
    broker = order_of(0, 3, control_facts=RECORDS, kinds=KINDS)
    assert not any(one.stays_dead for one in (*_series(), broker))

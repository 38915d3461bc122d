"""Tests of recovery times of struck roles and brokers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.support.kill_rounds.hunt import recovered_s
from tests.support.kill_rounds.inject import Ack, Files, Hit

NAMES = ("w0", "trainer")
S = 10**9


def book(files: Files, role: str, *acks: tuple[int, int, str, int]) -> None:
    lines = (
        Ack(index * S, pid, topic, 0, number, "0" * 64, began * S)
        for number, (began, index, topic, pid) in enumerate(acks)
    )
    files.acks_path(role).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def hit(role: str, *led: tuple[str, int]) -> Hit:
    return Hit(role=role, pid=7, phase="", at_ns=10 * S, led=led)


def test_a_role_is_back_with_the_first_record_of_its_next_process(tmp_path: Path) -> None:
    files = Files(tmp_path)
    book(files, "w0", (8, 9, "t", 7), (9, 11, "t", 7), (12, 13, "t", 8), (14, 15, "t", 8))
    assert recovered_s(files, hit("w0"), NAMES) == 3.0
    assert recovered_s(files, hit("trainer"), NAMES) is None


def test_a_broker_is_back_when_every_role_has_appended_again(tmp_path: Path) -> None:
    files = Files(tmp_path)
    book(files, "w0", (9, 12, "t", 1), (12, 13, "t", 1), (13, 14, "t", 1))
    book(files, "trainer", (8, 9, "c", 2), (15, 17, "c", 2))
    assert recovered_s(files, hit("broker"), NAMES) == 7.0, "what began before says nothing"
    assert recovered_s(files, hit("broker", ("t", 0)), NAMES) == 7.0
    assert recovered_s(files, hit("broker"), ("w0",)) == 3.0


def test_a_role_stays_dead_until_its_time_is_over_and_no_other_does(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write_hit(hit("w0"))
    assert files.dead_until_ns("w0") == 0
    files.write_hit(msgspec.structs.replace(hit("w0"), down_s=4.0), 1)
    assert [hit.down_s for hit in files.read_hits()] == [0.0, 4.0]
    assert files.dead_until_ns("w0") == 14 * S
    assert files.dead_until_ns("trainer") == 0

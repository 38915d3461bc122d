"""Tests of rendezvous of ranks and of lost ranks."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from dora_pipe.consumers.learners.deepspeed import meeting
from dora_pipe.consumers.learners.deepspeed.meeting import Meeting
from dora_pipe.core.errors import ResourceError

HOST = "127.0.0.1"
WAIT_S = 30.0


def _port() -> int:
    with socket.socket() as first_socket:
        first_socket.bind((HOST, 0))
        result: int = first_socket.getsockname()[1]
        return result


def _met(port: int) -> list[Meeting]:
    with ThreadPoolExecutor(2) as pool:
        coming = [
            pool.submit(Meeting, HOST, port, rank=rank, ranks=2, wait_s=WAIT_S) for rank in (1, 0)
        ]
        second, first = (entry.result(WAIT_S) for entry in coming)
    return [first, second]


def test_ranks_meet_in_whatever_order_they_come_and_share_a_store() -> None:
    first, second = _met(_port())
    first.store.set("word", "said")
    assert second.store.get("word") == b"said"


def test_a_rank_that_comes_again_is_told_and_all_others_hear_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "LOOK_S", 0.01)
    port = _port()
    there, heard = _met(port), [threading.Event(), threading.Event()]
    for entry, event in zip(there, heard, strict=True):
        entry.watch(event.set)
    with pytest.raises(ResourceError, match="rank 1 of the trainer restarted alone"):
        Meeting(HOST, port, rank=1, ranks=2, wait_s=WAIT_S)
    assert all(event.wait(WAIT_S) for event in heard)
    assert {entry.lost for entry in there} == {"rank 1 of the trainer was lost and has restarted"}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_others_never_come_says_where_it_waited_and_how_long(rank: int) -> None:
    port = _port()
    with pytest.raises(ResourceError) as caught:
        Meeting(HOST, port, rank=rank, ranks=2, wait_s=1.0)
    value = caught.value
    assert f"the trainer's 2 ranks did not meet at {HOST}:{port} within 1 s: " in value.message
    assert "--node 0, 1" in str(value.hint)

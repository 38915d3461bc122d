"""Running requests that are handed over, or whose weights change: asked of every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dora_pipe.producers.engines.port import (
    BATCH_INVARIANT,
    INTERRUPTIBLE,
    KV_EXPORT,
    PREFILL_EXACT,
    Kv,
)
from dora_pipe.producers.worker.kv_handover import KvHandover, KvLabel
from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers.files import MappedFiles
from tests.contract.test_engine_contract import subject
from tests.support import engine_moves as moves
from tests.support.engine_contract import Subject
from tests.support.worker import VirtualClock

__all__ = ["subject"]

HANDED_OVER: list[Callable[[Subject], None]] = [
    moves.check_a_request_moves_again_and_again,
    moves.check_what_is_not_complete_has_no_cache,
    moves.check_unfit_caches_are_refused,
]

IN_ANY_COMPANY: list[Callable[[Subject], None]] = [
    moves.check_moved_requests_end_as_if_they_had_stayed,
    moves.check_export_leaves_the_others_alone,
]

INTERRUPTED: list[Callable[[Subject], None]] = [
    moves.check_weights_change_under_running_requests,
    moves.check_weights_change_again_and_again,
    moves.check_refused_weights_leave_running_requests_alone,
]


@pytest.mark.parametrize("check", HANDED_OVER, ids=lambda check: check.__name__)
def test_running_request_is_handed_over(subject: Subject, check: Callable[[Subject], None]) -> None:
    _ask(subject, KV_EXPORT)
    check(subject)


@pytest.mark.parametrize("check", IN_ANY_COMPANY, ids=lambda check: check.__name__)
def test_running_request_is_handed_over_from_any_company_to_any(
    subject: Subject, check: Callable[[Subject], None]
) -> None:
    _ask(subject, KV_EXPORT, BATCH_INVARIANT)
    check(subject)


@pytest.mark.parametrize("check", INTERRUPTED, ids=lambda check: check.__name__)
def test_weights_change_under_requests(subject: Subject, check: Callable[[Subject], None]) -> None:
    _ask(subject, INTERRUPTIBLE)
    check(subject)


def test_cache_that_goes_through_a_file_is_the_cache(subject: Subject, tmp_path: Path) -> None:
    _ask(subject, KV_EXPORT)
    handover = KvHandover(MappedFiles(tmp_path, clock=VirtualClock()))
    label = KvLabel(trajectory="t", prefix="p")

    def carry(kv: Kv) -> Kv | None:
        blob = handover.put(label, kv)
        assert isinstance(blob, Blob)
        found = handover.fetch(label, blob)
        handover.drop(blob)  # it is mapped, and read when its request has a slot
        assert isinstance(found, Kv)
        return found

    moves.check_a_request_moves_again_and_again(subject, carry)
    if BATCH_INVARIANT in subject.open(slots=1).declares:
        moves.check_moved_requests_end_as_if_they_had_stayed(subject, carry, cuts=(7,))
    assert list(tmp_path.iterdir()) == []


def test_request_whose_cache_is_lost_on_its_way_is_prefilled(subject: Subject) -> None:
    _ask(subject, KV_EXPORT, BATCH_INVARIANT, PREFILL_EXACT)
    moves.check_moved_requests_end_as_if_they_had_stayed(subject, lambda kv: None, cuts=(7,))


def _ask(subject: Subject, *what: str) -> None:
    missing = set(what) - subject.open(slots=1).declares
    if missing:
        pytest.skip(f"{subject.name} does not declare {', '.join(sorted(missing))}")

"""Tests of weight updates during requests: sequence, progress, record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from dora_pipe.producers.worker.sequence import TokenSequence, chain_error
from dora_pipe.schemas.control import RequestFailed
from dora_pipe.schemas.trajectory import Progress
from tests.support.batches import progress_chunk
from tests.support.worker import Worker, World, digest_of

# Sequences


def stays(*lengths: int) -> TokenSequence:
    sequence = TokenSequence([1, 2], at_ns=0)
    sequence.start_stay(1)
    for number, length in enumerate(lengths):
        if number:
            sequence.reload(10 + number, worker="w", incarnation=7, version=2 + number)
        sequence.sampled([number] * length, [-1.0] * length, [-0.5] * length)
    return sequence


def test_progress_never_spans_two_versions() -> None:
    sequence = stays(3, 2, 4)
    parts = [sequence.part(sampled, worker="w", incarnation=7, version=5) for sampled in (0, 3, 5)]
    ends = [(start, segments[-1].version, segments[-1].end) for start, segments in parts]
    assert ends == [(0, 3, 5), (5, 4, 2), (7, 5, 4)]


def chunk(start: int, length: int, version: int, worker: str = "w") -> Progress:
    return progress_chunk(
        start + 2 if start else 0,
        [9] * length,
        [] if start else [1, 2],
        version=version,
        digest=digest_of(version),
        worker=worker,
    )


def why(chunks: list[Progress], newest: int | None) -> str | None:
    tokens = sum(sum(chunk.loss_mask) for chunk in chunks)
    return chain_error(
        chunks,
        trajectory="g0000000000-000",
        version=3,
        digest=digest_of(3),
        tokens=tokens,
        newest=newest,
    )


def test_chain_over_versions_is_refused_where_nothing_mixes_and_where_it_goes_back() -> None:
    grows = [chunk(0, 3, 3), chunk(3, 2, 4), chunk(5, 2, 6)]
    assert why(grows, 6) is None
    assert why(grows, 5) == "a progress record was made by version 6, not 4"
    assert why(grows, None) == "a progress record was made by version 4, not 3"
    back = [chunk(0, 3, 4), chunk(3, 2, 3)]
    assert why(back, 9) == "a progress record was made by version 3, not 4"
    other = replace(chunk(5, 2, 4), digest=digest_of(8))
    assert why([chunk(0, 3, 3), chunk(3, 2, 4), other], 9) is not None
    assert why([chunk(0, 3, 2)], 9) is not None


# A worker

LONG = 60


def start(version: int = 0, **changes: Any) -> tuple[World, Worker]:
    world = World(lengths=lambda seed, turn: LONG)
    return world, world.start(version, partial_rollout=True, max_tokens=200, **changes)


def test_placement_under_an_older_version_is_taken_and_under_a_newer_one_refused() -> None:
    world, worker = start(version=2)
    world.decide(
        world.place(worker, 0, version=1),
        world.place(worker, 1, version=3),
        world.place(worker, 2, version=1, purpose="eval"),
    )
    world.until_idle(worker)
    refused = {fact.trajectory: fact.error for fact in world.facts(RequestFailed)}
    assert refused == {"g0000000001-000": "OtherVersion", "e0000000002-000": "OtherVersion"}
    (entry,) = world.trajectories().values()
    assert (entry.version, entry.versions) == (1, [2])


def test_placement_with_other_weights_of_the_present_version_is_refused() -> None:
    world, worker = start(version=2)
    request = world.place(worker, 0, version=2)
    spec = msgspec.structs.replace(request.spec, digest=digest_of(9))
    world.decide(msgspec.structs.replace(request, spec=spec))
    world.ticks(worker, 4)
    (failure,) = world.facts(RequestFailed)
    assert failure.error == "OtherVersion"

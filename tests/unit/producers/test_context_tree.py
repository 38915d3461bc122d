"""Tests of contexts of an agent's calls and their record."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.producers.worker.effects import AnswerCall
from dora_pipe.producers.worker.session import CallPlace, ContextTree, placed
from dora_pipe.schemas.contexts import Call, Context, bounds, pieces
from dora_pipe.schemas.trajectory import TurnProgress
from tests.support.agents import wandering
from tests.support.worker import digest_of


def turn_of(
    tree: ContextTree, prompt: list[int], sampled: list[int], **changes: Any
) -> TurnProgress:
    position = len(tree.turns)
    turn = TurnProgress(
        trajectory="g0000000000-000",
        attempt=1,
        version=0,
        digest=digest_of(0),
        worker="w0",
        incarnation=3,
        turn=position,
        context=0,
        parent=-1,
        shared=0,
        given_ids=[],
        token_ids=sampled,
        logprobs=[-1.0] * len(sampled),
        sampler_logprobs=[-1.0] * len(sampled),
        prefills=(len(prompt),),
        previous=position - 1,
        started_ns=10 * position + 1,
        ended_ns=10 * position + 2,
        call=Call(
            start=len(prompt),
            end=len(prompt) + len(sampled),
            seed=position,
            asked_ns=10 * position,
            answered_ns=10 * position + 3,
        ),
    )
    return replace(placed(turn, tree.place(prompt)), **changes)


def tree_of(*calls: tuple[list[int], list[int]]) -> ContextTree:
    tree = ContextTree()
    for prompt, sampled in calls:
        assert tree.add(turn_of(tree, prompt, sampled)) == ""
    return tree


def test_call_that_extends_a_context_goes_on_with_it() -> None:
    tree = tree_of(([1, 2], [7, 8]))
    assert tree.place([1, 2, 7, 8, 3]) == CallPlace(0, -1, 0, [3])
    assert tree.place([1, 2, 7, 8]) == CallPlace(0, -1, 0, [])


def test_record_has_contexts_one_behind_another_and_calls_as_they_were_answered() -> None:
    tree = tree_of(([1, 2], [7]), ([5], [8]), ([1, 2, 7, 3], [9]))
    sequence, contexts, calls = tree.record()
    assert sequence.token_ids.tolist() == [1, 2, 7, 3, 9, 5, 8]
    assert contexts == (Context(5),)
    assert [(call.start, call.end, call.seed) for call in calls] == [
        (2, 3, 0),
        (6, 7, 1),
        (4, 5, 2),
    ]
    assert [(segment.kind, segment.turn) for segment in sequence.segments] == [
        ("prompt", 0),
        ("model", 0),
        ("environment", 0),
        ("model", 1),
        ("prompt", 0),
        ("model", 0),
    ]
    assert sequence.prefills == [2, 4, 6]
    assert sequence.prompt_tokens == 2
    assert sequence.moves == 0
    given_ = sequence.segments[2]
    assert (given_.start_ns, given_.end_ns) == (3, 20), "from the answer before to the next call"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"context": 2}, "not there"),
        ({"context": 1, "parent": -1, "shared": 3}, "not there"),
        ({"context": 1, "parent": 1, "shared": 1}, "not there"),
        ({"context": 1, "parent": 0, "shared": 9}, "not there"),
        ({"context": 0, "shared": 1}, "not there"),
        ({"context": 1}, "not where its context ends"),
    ],
)
def test_call_that_cannot_follow_is_refused_with_the_reason(
    changes: dict[str, int], why: str
) -> None:
    tree = tree_of(([1, 2], [7]))
    assert why in tree.add(turn_of(tree, [1, 2, 7, 3], [4], **changes))
    assert len(tree.turns) == 1


@given(st.integers(0, 2**32), st.data())
def test_every_call_comes_back_from_the_record_as_it_was_asked_and_answered(
    seed: int, data: st.DataObject
) -> None:
    calls = _calls(Random(seed))
    tree = tree_of(*calls)
    used = data.draw(st.sets(st.integers(0, len(calls) - 1), min_size=1))
    for kept in (range(len(calls)), sorted(used)):
        _check_record(tree.only(kept), [calls[position] for position in kept])
    assert tree.only(range(len(calls))).turns == tree.turns


def _calls(random: Random) -> list[tuple[list[int], list[int]]]:
    agent = wandering(random, 8)
    results: list[tuple[list[int], list[int]]] = []
    asks = next(agent)
    while True:
        texts = [[random.randrange(50, 60) for _ in range(random.randint(0, 4))] for _ in asks]
        results += [(ask.prompt, sampled) for ask, sampled in zip(asks, texts, strict=True)]
        try:
            asks = agent.send(
                [
                    AnswerCall(
                        request="r",
                        call=0,
                        token_ids=sampled,
                        logprobs=[],
                        finish="stop",
                        prompt_tokens=1,
                    )
                    for sampled in texts
                ]
            )
        except StopIteration:
            return results


def _check_record(tree: ContextTree, calls: list[tuple[list[int], list[int]]]) -> None:
    sequence, contexts, created = tree.record()
    length, token_ids = len(sequence), sequence.token_ids.tolist()
    assert sum(sequence.loss_mask) == sum(len(sampled) for _, sampled in calls)
    assert len({(entry.start, entry.seed) for entry in created}) == len(calls)
    places = list(enumerate(bounds(contexts, length)))
    for (prompt, sampled), call in zip(calls, created, strict=True):
        around = [index for index, (start, end) in places if start <= call.start <= end]
        stands = [_before(token_ids, contexts, position, length, call.start) for position in around]
        assert prompt in stands
        assert token_ids[call.start : call.end] == sampled
        assert list(sequence.loss_mask[call.start : call.end]) == [1] * len(sampled)


def _before(
    ids: list[int], contexts: tuple[Context, ...], position: int, length: int, end: int
) -> list[int]:
    results: list[int] = []
    *shared, (start, _) = pieces(contexts, position, length)
    for first, last in shared:
        results += ids[first:last]
    return [*results, *ids[start:end]]

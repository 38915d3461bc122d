"""Tests of the mismatch report: causes are detected and sum to the total."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dora_pipe.audit.mismatch import (
    CAUSES,
    Mismatch,
    Row,
    encoded_again,
    measure,
    metrics_of,
    stretches,
)
from dora_pipe.consumers.learners.learner import TrainBatch, TrainGroup
from dora_pipe.schemas.contexts import Context
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.trajectory import Segment, SegmentKind, Trajectory
from tests.support.batches import make_trajectory
from tests.support.contexts import in_pieces

STEP = 3


class Table:
    def __init__(self) -> None:
        self.version = -1
        self.loaded: list[int] = []

    def load(self, weights: Path, *, digest: str, optimizer: Path | None) -> None:
        assert optimizer is None
        assert digest == f"digest {weights}"
        self.version = int(str(weights))
        self.loaded.append(self.version)

    def score(self, rows: Sequence[Row]) -> list[list[float]]:
        return [
            [
                logprob(token, self.version)
                for token, entry in list(zip(*row, strict=True))[1:]
                if entry
            ]
            for row in rows
        ]

    def score_through(
        self, rows: Sequence[Row], choices: Sequence[Any]
    ) -> tuple[list[list[float]], int, int]:
        raise AssertionError("nothing here is a mixture")


class Letters:
    def ids(self, text: str) -> list[int]:
        results: list[int] = []
        while text:
            size = 2 if text[:1] == text[1:2] else 1
            results.append(ord(text[0]) + (1000 if size == 2 else 0))
            text = text[size:]
        return results

    def again(self, token_ids: Sequence[int]) -> list[int]:
        return self.ids(self.full_text(token_ids))

    def full_text(self, token_ids: Sequence[int]) -> str:
        return "".join(
            chr(token_id % 1000) * (2 if token_id >= 1000 else 1) for token_id in token_ids
        )


def logprob(token: int, version: int) -> float:
    return -1.0 - 0.001 * token - 0.01 * version * (token % 3)


def weights_of(version: int) -> tuple[Path, str]:
    return Path(str(version)), f"digest {version}"


def sampled_by(
    version: int, text: str, *, sample: int = 0, noise: float = 0.0, narrower: float = 0.0
) -> Trajectory:
    ids = [ord(entry) for entry in text]
    trajectory = make_trajectory(
        trajectory_id(group_id("train", version), sample),
        version=version,
        prompt=(65, 66),
        sampled=ids,
        logprobs=[logprob(token_id, version) - noise for token_id in ids],
    )
    sampler = [None if logprob is None else logprob + narrower for logprob in trajectory.logprobs]
    return replace(trajectory, sampler_logprobs=sampler)


def batch_of(*trajectories: Trajectory) -> TrainBatch:
    groups = {
        trajectory.version: group_id("train", trajectory.version) for trajectory in trajectories
    }
    return TrainBatch(
        step=STEP,
        groups=[
            TrainGroup(
                group=group,
                version=version,
                trajectories=[
                    trajectory for trajectory in trajectories if trajectory.version == version
                ],
            )
            for version, group in sorted(groups.items())
        ],
    )


def cause(mismatch: Mismatch, name: str) -> float:
    return next(metric.size for metric in mismatch.metrics if metric.cause == name)


def test_staleness_is_what_the_weights_moved_since() -> None:
    measurement = measure(batch_of(sampled_by(1, "abc"), sampled_by(3, "abc")), Table(), weights_of)
    tokens = [ord(entry) for entry in "abc"]
    moved = [0.02 * (token % 3) for token in tokens]
    assert cause(measurement, "staleness") == pytest.approx(sum(moved) / 6)
    assert cause(measurement, "numerics") == pytest.approx(0.0, abs=1e-12)
    assert cause(measurement, "sampling") == 0.0
    assert set(measurement.by_staleness) == {0, 2}
    assert measurement.by_staleness[0].largest == 0.0
    assert measurement.by_staleness[2].largest == pytest.approx(max(moved))


def test_numerics_are_what_the_engine_was_off_under_the_same_weights() -> None:
    measurement = measure(batch_of(sampled_by(3, "abc", noise=0.25)), Table(), weights_of)
    assert cause(measurement, "numerics") == pytest.approx(0.25)
    assert cause(measurement, "staleness") == 0.0
    assert cause(measurement, "trained") == pytest.approx(0.25)


def test_sampling_is_what_the_sampler_kept_of_the_distribution() -> None:
    measurement = measure(batch_of(sampled_by(3, "abc", narrower=0.4)), Table(), weights_of)
    assert cause(measurement, "sampling") == pytest.approx(0.4)
    assert cause(measurement, "trained") == pytest.approx(0.0, abs=1e-12)
    assert cause(measurement, "all") == pytest.approx(0.4)


def test_causes_add_up_to_the_whole_and_their_shares_to_1() -> None:
    parts = [
        sampled_by(1, "hello", noise=0.1),
        sampled_by(2, "world", narrower=0.3),
        sampled_by(3, "again", noise=-0.2, narrower=0.1),
    ]
    measurement = measure(batch_of(*parts), Table(), weights_of)
    by_name = {metric.cause: metric for metric in measurement.metrics}
    means = [by_name[name].mean for name in CAUSES]
    assert sum(means) == pytest.approx(by_name["all"].mean)
    shares = [by_name[name].share for name in CAUSES]
    assert sum(share for share in shares if share is not None) == pytest.approx(1.0)
    assert by_name["all"].share == pytest.approx(1.0)
    assert measurement.tokens == 15
    assert measurement.plain()["causes"]["staleness"]["mean"] == by_name["staleness"].mean


def test_versions_are_loaded_once_each_in_ascending_order() -> None:
    table = Table()
    measure(
        batch_of(sampled_by(2, "ab"), sampled_by(1, "cd"), sampled_by(2, "e", sample=1)),
        table,
        weights_of,
    )
    assert table.loaded == [1, 2, 3]


def test_mixed_trajectory_is_held_against_the_version_of_each_token() -> None:
    trajectory = sampled_by(1, "abcd")
    prompt, full = trajectory.segments
    parts = [
        prompt,
        msgspec.structs.replace(full, end=4),
        msgspec.structs.replace(full, start=4, version=2),
    ]
    recorded = [
        None if entry is None else logprob(token, 1 if index < 4 else 2)
        for index, (token, entry) in enumerate(
            zip(trajectory.token_ids, trajectory.logprobs, strict=True)
        )
    ]
    mixed = replace(trajectory, segments=parts, logprobs=recorded, sampler_logprobs=recorded)
    measurement = measure(batch_of(mixed), Table(), weights_of)
    assert cause(measurement, "numerics") == pytest.approx(0.0, abs=1e-12)
    assert {age: entry.tokens for age, entry in measurement.by_staleness.items()} == {1: 2, 2: 2}


def test_trajectory_without_a_sampled_token_is_left_out() -> None:
    empty = sampled_by(3, "")
    measurement = measure(batch_of(sampled_by(3, "a", sample=1), empty), Table(), weights_of)
    assert (measurement.trajectories, measurement.tokens) == (1, 1)
    nothing = measure(batch_of(empty), Table(), weights_of, Letters())
    assert (nothing.trajectories, nothing.tokens) == (0, 0)
    assert nothing.metrics[0].share is None


# Tokenization.


def test_text_that_is_encoded_to_other_ids_is_counted_from_its_first_difference() -> None:
    table = Table()
    same, other = sampled_by(3, "abc"), sampled_by(3, "abbc", sample=1)
    tokenization = measure(batch_of(same, other), table, weights_of, Letters()).tokenization
    assert tokenization is not None
    assert (tokenization.trajectories, tokenization.differing) == (2, 1)
    assert (tokenization.tokens, tokenization.tokens_after) == (7, 3)
    double = logprob(ord("b") + 1000, 3)
    assert tokenization.logprob_mean == pytest.approx(double - 2 * logprob(ord("b"), 3))
    assert tokenization.logprob_largest == pytest.approx(abs(double - 2 * logprob(ord("b"), 3)))


def test_prompt_stands_as_it_was_encoded() -> None:
    trajectory = make_trajectory("g0000000001-000", prompt=(97, 97), sampled=(98, 98, 99))
    again = encoded_again(trajectory, Letters())
    assert again == [([97, 97, 98 + 1000, 99], [0, 0, 1, 1])]
    assert encoded_again(make_trajectory("g0000000001-000", sampled=(98, 99)), Letters()) is None


def test_turn_that_moved_between_workers_is_encoded_whole() -> None:
    def segment(kind: SegmentKind, start: int, end: int, turn: int) -> Segment:
        return Segment(kind=kind, start=start, end=end, turn=turn, start_ns=1, end_ns=2)

    parts = [
        segment("prompt", 0, 2, 0),
        segment("model", 2, 5, 0),
        segment("model", 5, 6, 0),
        segment("environment", 6, 8, 0),
        segment("model", 8, 9, 1),
    ]
    assert stretches(parts) == [(0, 2, False), (2, 6, True), (6, 8, False), (8, 9, True)]


def test_contexts_are_held_against_what_they_were_sampled_behind() -> None:
    class Positions(Table):
        def score(self, rows: Sequence[Row]) -> list[list[float]]:
            return [
                [
                    logprob(own + before, self.version)
                    for before, own, bit in zip(ids, ids[1:], mask[1:], strict=False)
                    if bit
                ]
                for ids, mask in rows
            ]

    pieces = in_pieces(
        sampled_by(3, "abcdefg"),
        [("prompt", 2), ("model", 3), ("prompt", 0), ("model", 2), ("prompt", 1), ("model", 1)],
        (Context(start=5, parent=0, shared=2), Context(start=7)),
    )
    behind = dict(zip("abcdeg", [66, ord("a"), ord("b"), 66, ord("d"), ord("f")], strict=True))
    recorded = [
        None if entry is None else logprob(token + behind[chr(token)], 3)
        for token, entry in zip(pieces.token_ids, pieces.logprobs, strict=True)
    ]
    pieces = replace(pieces, logprobs=recorded, sampler_logprobs=recorded)
    measurement = measure(batch_of(pieces, sampled_by(3, "a", sample=1)), Positions(), weights_of)
    (numerics,) = [metric for metric in measurement.metrics if metric.cause == "numerics"]
    assert measurement.tokens == 7
    assert numerics.largest == pytest.approx(abs(logprob(66 + ord("a"), 3) - logprob(ord("a"), 3)))
    alone = measure(batch_of(pieces), Positions(), weights_of)
    assert cause(alone, "numerics") == pytest.approx(0.0, abs=1e-12)


def test_text_of_a_context_is_encoded_again_behind_what_it_shares() -> None:
    pieces = in_pieces(
        sampled_by(3, "aabbcc"),
        [("prompt", 2), ("model", 2), ("prompt", 0), ("model", 2), ("prompt", 1), ("model", 1)],
        (Context(start=4, parent=0, shared=4), Context(start=6)),
    )
    assert encoded_again(pieces, Letters()) == [
        ([65, 66, 97 + 1000], [0, 0, 1]),
        ([65, 66, 97, 97, 98 + 1000], [0, 0, 0, 0, 1]),
        ([99, 99], [0, 1]),
    ]
    tokenization = measure(batch_of(pieces), Table(), weights_of, Letters()).tokenization
    assert tokenization is not None
    assert (tokenization.differing, tokenization.tokens, tokenization.tokens_after) == (1, 5, 4)


def test_share_of_a_cause_that_works_against_the_others_is_negative() -> None:
    total = np.array([0.0, 1.0, 2.0])
    assert metrics_of("staleness", -total, total).share == pytest.approx(-1.0)
    assert metrics_of("staleness", total, np.zeros(3)).share is None


def test_share_of_a_cause_that_shifts_every_token_alike_is_what_it_shifts() -> None:
    shift, noise = np.full(4, -0.9), np.array([0.1, -0.1, 0.1, -0.1])
    assert metrics_of("sampling", shift, shift + noise).share == pytest.approx(0.81 / 0.82)
    assert metrics_of("numerics", noise, shift + noise).share == pytest.approx(0.01 / 0.82)

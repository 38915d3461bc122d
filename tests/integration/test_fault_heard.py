"""What became of the agents of a kill round: what they were answered, and what the log has."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bench.faults.heard import Heard, heard_again
from dora_pipe.producers.sessions.addresses import session_name
from dora_pipe.producers.worker.request import key_of
from dora_pipe.schemas.contexts import contexts_of, place_of
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from tests.support.branched_run import branch, branched
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Tamper

Line = tuple[str, str, list[int], list[int]]
"""As `Told`."""


def the_agents(run: RecordedRun) -> Trajectory:
    bus = run.open()
    try:
        ends = ends_of(bus, run.topics.trajectories)
        found = [decode_trajectory(record.value) for record in records_of(bus, ends)]
        return next(one for one in found if one.meta.calls)
    finally:
        bus.close()


def lines_of(one: Trajectory, start: str) -> list[Line]:
    """What an agent would write that made the trajectory's calls."""
    contexts = list(contexts_of(one))
    session = session_name(key_of(one.trajectory, one.meta.attempt))
    found: list[Line] = []
    for call in one.meta.calls:
        number, length = place_of(call, one.meta.contexts)
        prompt = contexts[number].token_ids[:length].tolist()
        found.append((session, start, prompt, list(one.token_ids[call.start : call.end])))
    return found


def judged(run: RecordedRun, told: Path, lines: list[Line], cut: str = "") -> Heard:
    told.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + cut)
    bus = run.open()
    try:
        return heard_again(bus, run.topics, told)
    finally:
        bus.close()


@pytest.fixture
def lines(copy: RecordedRun) -> list[Line]:
    with Tamper(copy) as log:
        branch(log)
    return lines_of(the_agents(copy), "second")


def test_an_agent_that_is_answered_again_with_the_same_tokens_is_clean(
    copy: RecordedRun, lines: list[Line], tmp_path: Path
) -> None:
    first = [(session, "first", prompt, tokens) for session, _, prompt, tokens in lines[:3]]
    heard = judged(copy, tmp_path / "told", [*first, *lines], cut='["half a li')
    assert heard.clean, heard
    assert (heard.starts, heard.calls, heard.again) == (2, len(lines) + 3, 3)
    assert heard.episodes > 10
    assert heard.sampled_again == heard.lost == 0


def test_an_answer_that_comes_again_with_other_tokens_is_seen(
    copy: RecordedRun, lines: list[Line], tmp_path: Path
) -> None:
    session, _, prompt, tokens = lines[0]
    other = (session, "first", prompt, [*tokens[:-1], tokens[-1] + 1])
    heard = judged(copy, tmp_path / "told", [other, *lines])
    assert (heard.other_tokens, heard.untold, heard.clean) == (1, 0, False)


def test_what_the_last_start_was_not_answered_is_no_part_of_a_trajectory(
    copy: RecordedRun, lines: list[Line], tmp_path: Path
) -> None:
    assert judged(copy, tmp_path / "told", lines[:-1]).untold == 1
    session, start, prompt, tokens = lines[-1]
    more = (session, start, [*prompt, 7], tokens)
    assert judged(copy, tmp_path / "told", [*lines, more]).untold == 1
    assert not judged(copy, tmp_path / "told", []).clean


@pytest.mark.parametrize(
    ("error", "lost"), [("ProcessDied: killed by signal 9", 1), ("ValueError: odd", 0)]
)
def test_a_trajectory_that_is_invalid_for_a_death_is_lost(
    copy: RecordedRun, tmp_path: Path, error: str, lost: int
) -> None:
    with Tamper(copy) as log:
        branch(log, change=_failing(error))
    heard = judged(copy, tmp_path / "told", lines_of(the_agents(copy), "only"))
    assert (heard.lost, heard.clean) == (lost, not lost)


def _failing(error: str) -> Callable[[Trajectory], Trajectory]:
    def change(one: Trajectory) -> Trajectory:
        made = branched(one)
        meta = msgspec.structs.replace(made.meta, reward_error=error)
        return replace(made, reward=None, meta=meta)

    return change

"""Continuations of a recorded trajectory: with its own random stream they are the trajectory itself
from every turn, equal seeds give equal continuations, and an environment that answers differently
is named.

Method: runs of the simulated engine, whose tokens are a function of weights, seed and position.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.analysis import fork
from dora_pipe.analysis.fork import turn_starts
from dora_pipe.audit.replay_trajectory import recorded_trajectory
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.schemas.identity import group_seed, parse_trajectory_id
from dora_pipe.schemas.trajectory import Trajectory
from tests.support import fork_stage
from tests.support.command_line import Call
from tests.support.fork_stage import Puzzles, install, single_turns
from tests.support.recorded_run import RecordedRun

RUN_SEED = 7


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return fork_stage.record(tmp_path_factory.mktemp("fork") / "episodes", Puzzles)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return fork_stage.record(tmp_path_factory.mktemp("fork") / "texts", single_turns)


def recorded(run: RecordedRun, turns_min: int = 1) -> Trajectory:
    with closing(run.open()) as bus, closing(read_catalogue(bus, run.topics)) as tables:
        names = tables.query("select trajectory_id from trajectories where reward is not null")
        for (name,) in sorted(names):
            one = recorded_trajectory(bus, run.topics, tables, name)
            if len(turn_starts(one)) >= turns_min and one.sampled > 6:
                return one
    raise AssertionError("there is none")


def forked(call: Call, run: RecordedRun, name: str, *words: object) -> dict[str, Any]:
    code, out, err = call("fork", run.directory, name, "--json", *words)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def with_its_own_seed(monkeypatch: pytest.MonkeyPatch, one: Trajectory) -> None:
    _, ordinal, _ = parse_trajectory_id(one.trajectory)

    def seed(of_trajectory: int, token: int) -> int:
        return group_seed(RUN_SEED, "train", ordinal)

    monkeypatch.setattr(fork, "cut_seed", seed)


def test_with_its_own_random_stream_every_turn_continues_as_recorded(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = recorded(episodes, 4)
    install(monkeypatch, Puzzles)
    with_its_own_seed(monkeypatch, one)
    found = forked(call, episodes, one.trajectory, "--samples", one.meta.sample + 1)
    assert [place["turn"] for place in found["turns"]] == [0, 1, 2, 3]
    for place, token in zip(found["turns"], turn_starts(one).values(), strict=True):
        again = place["samples"][one.meta.sample]
        assert place["token"] == token
        assert again["token_ids"] == list(one.token_ids[token:])
        assert again["reward"] == one.reward


def test_a_text_of_one_turn_is_sampled_again_from_its_prompt(
    texts: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = recorded(texts)
    install(monkeypatch, single_turns)
    with_its_own_seed(monkeypatch, one)
    found = forked(call, texts, one.trajectory, "--samples", one.meta.sample + 1)
    (turn,) = found["turns"]
    assert turn["token"] == one.meta.prompt_tokens
    assert turn["samples"][-1]["token_ids"] == list(one.token_ids[turn["token"] :])


def test_equal_seeds_give_equal_continuations_and_versions_differ(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = episodes.copy(tmp_path / "copy")
    one = recorded(run, 3)
    install(monkeypatch, Puzzles)
    before = run.log.read_bytes()
    found = forked(call, run, one.trajectory, "--samples", 3)
    more = forked(call, run, one.trajectory, "--samples", 4)
    for few, many in zip(found["turns"], more["turns"], strict=True):
        assert few["samples"] == many["samples"][:3]
    other = forked(call, run, one.trajectory, "--samples", 3, "--version", 1)
    assert (other["version"], other["sampled_by"]) == (1, 0)
    assert other["turns"] != found["turns"]
    code, out, err = call("fork", run.directory, one.trajectory, "--turn", 1, "--samples", 2)
    assert code == 0, err
    assert "2 continuations" in out
    assert run.log.read_bytes() == before


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_an_environment_that_answers_differently_is_named_with_the_turn(
    turn: int, episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the answer to the last turn before the cut, which a worker does not compare."""
    one = recorded(episodes, 4)
    install(monkeypatch, lambda: Puzzles(slip="another"))
    words = ("--turn", turn, "--samples", 1)
    code, _, err = call("fork", episodes.directory, one.trajectory, *words)
    assert code == 6
    assert "cannot return to its turns: the answer to turn" in err


def test_an_environment_that_is_not_replayable_is_refused(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = recorded(episodes, 4)

    class Silent(Puzzles):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.replayable = False

    install(monkeypatch, Silent)
    words = ("--turn", 1, "--samples", 1)
    code, _, err = call("fork", episodes.directory, one.trajectory, *words)
    assert code == 2
    assert "does not declare `replayable`" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--turn", 9), "has no turn 9, it has turns 0 to 3"),
        (("--samples", 0), "--samples must be 1 to 1000"),
        (("--version", 77), "version 77 was not published"),
    ],
)
def test_a_place_that_does_not_exist_is_refused_in_one_line(
    words: tuple[object, ...], said: str, episodes: RecordedRun, call: Call
) -> None:
    one = recorded(episodes, 4)
    code, _, err = call("fork", episodes.directory, one.trajectory, *words)
    assert code == 2
    assert said in err


def test_a_trajectory_without_a_record_is_refused(episodes: RecordedRun, call: Call) -> None:
    code, _, err = call("fork", episodes.directory, "g0000999999-000")
    assert code == 2
    assert "has no record that counts" in err

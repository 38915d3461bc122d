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
            trajectory = recorded_trajectory(bus, run.topics, tables, name)
            if len(turn_starts(trajectory)) >= turns_min and trajectory.sampled > 6:
                return trajectory
    raise AssertionError("there is none")


def forked(call: Call, run: RecordedRun, name: str, *words: object) -> dict[str, Any]:
    code, out, err = call("fork", run.directory, name, "--json", *words)
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def with_its_own_seed(monkeypatch: pytest.MonkeyPatch, trajectory: Trajectory) -> None:
    _, ordinal, _ = parse_trajectory_id(trajectory.trajectory)

    def seed(of_trajectory: int, token: int) -> int:
        return group_seed(RUN_SEED, "train", ordinal)

    monkeypatch.setattr(fork, "cut_seed", seed)


def test_with_its_own_random_stream_every_turn_continues_as_recorded(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    trajectory = recorded(episodes, 4)
    install(monkeypatch, Puzzles)
    with_its_own_seed(monkeypatch, trajectory)
    result = forked(call, episodes, trajectory.trajectory, "--samples", trajectory.meta.sample + 1)
    assert [row["turn"] for row in result["turns"]] == [0, 1, 2, 3]
    for row, token in zip(result["turns"], turn_starts(trajectory).values(), strict=True):
        again = row["samples"][trajectory.meta.sample]
        assert row["token"] == token
        assert again["token_ids"] == list(trajectory.token_ids[token:])
        assert again["reward"] == trajectory.reward


def test_a_text_of_one_turn_is_sampled_again_from_its_prompt(
    texts: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    trajectory = recorded(texts)
    install(monkeypatch, single_turns)
    with_its_own_seed(monkeypatch, trajectory)
    result = forked(call, texts, trajectory.trajectory, "--samples", trajectory.meta.sample + 1)
    (turn,) = result["turns"]
    assert turn["token"] == trajectory.meta.prompt_tokens
    assert turn["samples"][-1]["token_ids"] == list(trajectory.token_ids[turn["token"] :])


def test_equal_seeds_give_equal_continuations_and_versions_differ(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = episodes.copy(tmp_path / "copy")
    entry = recorded(run, 3)
    install(monkeypatch, Puzzles)
    before = run.log.read_bytes()
    result = forked(call, run, entry.trajectory, "--samples", 3)
    more = forked(call, run, entry.trajectory, "--samples", 4)
    for few, many in zip(result["turns"], more["turns"], strict=True):
        assert few["samples"] == many["samples"][:3]
    other = forked(call, run, entry.trajectory, "--samples", 3, "--version", 1)
    assert (other["version"], other["sampled_by"]) == (1, 0)
    assert other["turns"] != result["turns"]
    code, out, err = call("fork", run.directory, entry.trajectory, "--turn", 1, "--samples", 2)
    assert code == 0, err
    assert "2 continuations" in out
    assert run.log.read_bytes() == before


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_an_environment_that_answers_differently_is_named_with_the_turn(
    turn: int, episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = recorded(episodes, 4)
    install(monkeypatch, lambda: Puzzles(slip="another"))
    words = ("--turn", turn, "--samples", 1)
    code, _, err = call("fork", episodes.directory, entry.trajectory, *words)
    assert code == 6
    assert "cannot return to its turns: the answer to turn" in err


def test_an_environment_that_is_not_replayable_is_refused(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = recorded(episodes, 4)

    class Silent(Puzzles):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.replayable = False

    install(monkeypatch, Silent)
    words = ("--turn", 1, "--samples", 1)
    code, _, err = call("fork", episodes.directory, entry.trajectory, *words)
    assert code == 2
    assert "does not declare `replayable`" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--turn", 9), "has no turn 9, it has turns 0 to 3"),
        (("--samples", 0), "Invalid value for '--samples'"),
        (("--version", 77), "version 77 was not published"),
    ],
)
def test_a_place_that_does_not_exist_is_refused_in_one_line(
    words: tuple[object, ...], text: str, episodes: RecordedRun, call: Call
) -> None:
    entry = recorded(episodes, 4)
    code, _, err = call("fork", episodes.directory, entry.trajectory, *words)
    assert code == 2
    assert text in err


def test_a_trajectory_without_a_record_is_refused(episodes: RecordedRun, call: Call) -> None:
    code, _, err = call("fork", episodes.directory, "g0000999999-000")
    assert code == 2
    assert "has no record that counts" in err

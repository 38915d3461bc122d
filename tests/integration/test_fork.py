"""Continuations of a recorded trajectory: with its own random stream they are the trajectory itself
from whichever turn; an environment that answers otherwise is named; what was ended goes on.

Method: runs of the simulated engine, whose tokens are a function of weights, seed and position.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.audit import fork_log
from dora_pipe.audit.fork import turn_starts
from dora_pipe.audit.replay_trajectory import joins_of, recorded_trajectory
from dora_pipe.bus.port import Bus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.cli import fork
from dora_pipe.cli.task_again import codes_of
from dora_pipe.config.model import Task
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.tasks.calls import EnvObserved, EnvStep, TaskEvent
from dora_pipe.producers.worker import role
from dora_pipe.schemas.control import RunStarted, WorkerJoined
from dora_pipe.schemas.identity import group_seed, parse_trajectory_id
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from tests.support import fork_stage
from tests.support.command_line import Call
from tests.support.fork_stage import Puzzles, install, single_turns
from tests.support.orchestrator_records import joined as worker_joined
from tests.support.recorded_run import RecordedRun

RUN_SEED = 7


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return fork_stage.record(tmp_path_factory.mktemp("fork") / "episodes", Puzzles)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return fork_stage.record(tmp_path_factory.mktemp("fork") / "texts", single_turns)


def recorded(run: RecordedRun, turns_min: int = 1) -> Trajectory:
    """The first trajectory with a reward and so many turns."""
    with closing(run.open()) as bus, closing(read_catalogue(bus, run.topics)) as tables:
        names = tables.query("select trajectory_id from trajectories where reward is not null")
        for (name,) in sorted(names):
            one = recorded_trajectory(bus, run.topics, tables, name)
            if len(turn_starts(one)) >= turns_min and one.sampled > 6:
                return one
    raise AssertionError("there is none")


def forked(call: Call, run: RecordedRun, name: str, out: Path, *words: object) -> dict[str, Any]:
    code, said, err = call("fork", run.directory, name, "--json", "--out", out, *words)
    assert code == 0, err
    found: dict[str, Any] = json.loads(said)
    return found


def continuations(one: Trajectory, out: Path, version: int) -> dict[tuple[int, int], Trajectory]:
    """Those that the log has, by token and sample."""
    log = out / f"{one.trajectory}-v{version}" / "log.sqlite"
    with closing(SqliteBus(log)) as bus:
        found = fork_log.ForkLog(bus=bus, recorded=one, version=version, digest="")
        return {(cut.token, sample): each for (cut, sample), each in found.samples().items()}


def with_its_own_seed(monkeypatch: pytest.MonkeyPatch, one: Trajectory) -> None:
    """The sample with the number of its sibling draws as it did, from every cut."""
    _, ordinal, _ = parse_trajectory_id(one.trajectory)

    def seed(of_trajectory: int, token: int) -> int:
        return group_seed(RUN_SEED, "train", ordinal)

    monkeypatch.setattr(fork_log, "cut_seed", seed)


def test_with_its_own_random_stream_a_continuation_is_the_trajectory_itself(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = recorded(episodes, 4)
    install(monkeypatch, Puzzles)
    with_its_own_seed(monkeypatch, one)
    found = forked(call, episodes, one.trajectory, tmp_path, "--samples", one.meta.sibling + 1)
    assert [turn["turn"] for turn in found["turns"]] == [0, 1, 2, 3]
    for token in turn_starts(one).values():
        again = continuations(one, tmp_path, one.version)[token, one.meta.sibling]
        assert list(again.token_ids) == list(one.token_ids)
        assert list(again.logprobs) == list(one.logprobs)
        assert again.reward == one.reward


def test_a_text_of_one_turn_is_cut_at_tokens_and_in_pieces(
    texts: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = recorded(texts)
    install(monkeypatch, single_turns)
    with_its_own_seed(monkeypatch, one)
    samples = ("--samples", one.meta.sibling + 1)
    found = forked(call, texts, one.trajectory, tmp_path, "--pieces", 3, *samples)
    assert len(found["turns"]) == 3
    start = one.meta.prompt_tokens
    forked(call, texts, one.trajectory, tmp_path, "--at", start + 5, *samples)
    again = continuations(one, tmp_path, one.version)
    for token in (*(turn["token"] for turn in found["turns"]), start + 5):
        assert list(again[token, one.meta.sibling].token_ids) == list(one.token_ids)


def test_another_version_continues_the_recorded_tokens(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = recorded(episodes, 3)
    install(monkeypatch, Puzzles)
    words = ("--turn", 2, "--samples", 4)
    forked(call, episodes, one.trajectory, tmp_path, *words)
    found = forked(call, episodes, one.trajectory, tmp_path, *words, "--version", 1)
    assert (found["version"], found["sampled_by"]) == (1, 0)
    token = turn_starts(one)[2]
    own, other = (continuations(one, tmp_path, version) for version in (0, 1))
    for sample in range(4):
        assert list(other[token, sample].token_ids[:token]) == list(one.token_ids[:token])
        assert own[token, sample].meta.seed == other[token, sample].meta.seed
    assert [each.token_ids for each in own.values()] != [each.token_ids for each in other.values()]


def test_the_log_of_the_run_stays_and_what_is_known_lies_beside_it(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = episodes.copy(tmp_path / "copy")
    one = recorded(run, 4)
    install(monkeypatch, Puzzles)
    before = run.log.read_bytes()
    code, out, err = call("fork", run.directory, one.trajectory, "--samples", 3)
    assert code == 0, err
    assert "12 continuations now" in out
    file = run.directory / "forks" / f"{one.trajectory}-v0.json"
    assert str(file) in out
    kept = json.loads(file.read_text())
    assert [turn["samples"] for turn in kept["turns"]] == [3, 3, 3, 3]
    assert kept["reward"] == one.reward
    assert run.log.read_bytes() == before
    code, out, err = call("fork", run.directory, one.trajectory, "--turn", 1, "--samples", 2)
    assert code == 0, err
    assert "0 continuations now" in out
    assert json.loads(file.read_text()) == kept


class _Ended(Exception):
    pass


def test_the_command_goes_on_where_it_was_ended_with_the_same_bits(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = recorded(episodes, 4)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    install(monkeypatch, Puzzles)
    wanted = forked(call, episodes, one.trajectory, whole, "--samples", 6)
    steps, step = 0, SimulatedEngine.step

    def ended(engine: SimulatedEngine) -> list[Any]:
        nonlocal steps
        steps += 1
        if steps > 60:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(SimulatedEngine, "step", ended)
    code, _, _ = call("fork", episodes.directory, one.trajectory, "--out", broken, "--samples", 6)
    assert code == 130
    there = len(continuations(one, broken, 0))
    monkeypatch.setattr(SimulatedEngine, "step", step)
    found = forked(call, episodes, one.trajectory, broken, "--samples", 6)
    assert found["sampled_now"] == 24 - there
    assert found["turns"] == wanted["turns"]


@pytest.mark.parametrize("told_again", [1, 2, 3])
def test_an_environment_that_answers_otherwise_is_named_with_the_turn(
    told_again: int,
    episodes: RecordedRun,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Also where it is the answer to the last turn, which a worker does not compare."""
    one = recorded(episodes, 4)
    install(monkeypatch, lambda: Puzzles(slip="another"))
    words = ("--turn", told_again, "--samples", 1, "--out", tmp_path)
    code, _, err = call("fork", episodes.directory, one.trajectory, *words)
    assert code == 6
    assert "cannot be brought to its turns again: the answer to turn" in err


def test_an_environment_that_does_not_say_so_is_told_again_if_one_wants_it(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = recorded(episodes, 4)

    class Silent(Puzzles):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.replayable = False

    install(monkeypatch, Silent)
    words = ("--turn", 1, "--samples", 1, "--out", tmp_path)
    code, _, err = call("fork", episodes.directory, one.trajectory, *words)
    assert code == 2
    assert "does not say that it can be told its turns again" in err
    assert "--replayable" in err
    install(monkeypatch, Puzzles, replayable=True)
    assert call("fork", episodes.directory, one.trajectory, *words, "--replayable")[0] == 0


def test_an_episode_that_ends_where_it_went_on_is_named(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = recorded(episodes, 4)

    class Short(Puzzles):
        def _respond(self, call: EnvStep) -> TaskEvent:
            found = super()._respond(call)
            assert isinstance(found, EnvObserved)
            return EnvObserved(
                request=found.request, text=found.text, done=True, tool=found.tool, ok=True
            )

    install(monkeypatch, Short)
    words = ("--turn", 1, "--samples", 1, "--out", tmp_path)
    code, _, err = call("fork", episodes.directory, one.trajectory, *words)
    assert code == 6
    assert "the answer to turn 0 ends the episode, which went on" in err


def test_continuations_of_another_reward_are_not_mixed_in(
    episodes: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = recorded(episodes, 4)
    words = ("--turn", 1, "--out", tmp_path)
    install(monkeypatch, Puzzles)
    assert call("fork", episodes.directory, one.trajectory, *words, "--samples", 1)[0] == 0
    install(monkeypatch, Puzzles, reward_digest="b" * 64)
    code, _, err = call("fork", episodes.directory, one.trajectory, *words, "--samples", 2)
    assert code == 2
    assert "continuations of another engine, task or reward" in err
    assert "--out DIR" in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--turn", 9), 2, "has no turn 9, it has turns 0 to 3"),
        (("--at", 4000), 2, "cannot be cut behind 4000"),
        (("--at", 0), 2, "was not sampled: it is of the prompt"),
        (("--pieces", 100_000), 2, "sampled tokens, not 100000 pieces"),
        (("--turn", 1, "--pieces", 2), 2, "say different things"),
        (("--samples", 0), 2, "--samples is 1 to 1000"),
        (("--version", 77), 2, "version 77 was not published"),
    ],
)
def test_what_cannot_be_continued_is_refused_in_one_line(
    words: tuple[object, ...], code: int, said: str, episodes: RecordedRun, call: Call
) -> None:
    one = recorded(episodes, 4)
    found, _, err = call("fork", episodes.directory, one.trajectory, *words)
    assert found == code
    assert said in err


def test_a_trajectory_that_is_not_there_is_refused(episodes: RecordedRun, call: Call) -> None:
    code, _, err = call("fork", episodes.directory, "g0000999999-000")
    assert code == 2
    assert "has no record that counts" in err


def test_of_several_tasks_the_one_of_the_trajectory_alone_is_started(
    call: Call, episodes: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = recorded(episodes, turns_min=2)
    install(monkeypatch, Puzzles)
    after, pool, names = vars(fork)["policy_after"], vars(role)["TaskPool"], list[str]()

    def with_another(bus: Bus, topics: Topics, version: int) -> tuple[RunStarted, object]:
        found, step = after(bus, topics, version)
        more = [{**found.config["task"], "kind": "sandbox:Task", "name": "other"}]
        return msgspec.structs.replace(found, config={**found.config, "more_tasks": more}), step

    def noted(task: Task, **how: Any) -> Any:
        names.append(task.name)
        return pool(task, **how)

    def joined(*log: Any) -> list[WorkerJoined]:
        """As a worker with both tasks would have said it."""
        digests = {one.meta.source: "d" * 64, "train/other": "e" * 64}
        return [msgspec.structs.replace(said, reward_digests=digests) for said in joins_of(*log)]

    monkeypatch.setattr(fork, "policy_after", with_another)
    monkeypatch.setattr(fork, "joins_of", joined)
    monkeypatch.setattr(role, "TaskPool", noted)
    words = ("--out", tmp_path / "forks", "--samples", 1)
    code, _, err = call("fork", episodes.directory, one.trajectory, *words)
    assert code == 0, err
    assert names and set(names) == {""}
    assert re.search(r"code is another one here \(\w+\) than workers .* had \(d{12}\)", err)
    assert "eeee" not in err


def test_nothing_is_said_of_a_workers_code_that_named_all_tasks_in_one() -> None:
    both = worker_joined("w0")
    assert codes_of([both], "train/a", several=True) == set()
    assert codes_of([both], "train/a", several=False) == {both.reward_digest}
    each = msgspec.structs.replace(both, reward_digests={"train/a": "a", "train/b": "b"})
    assert codes_of([both, each], "train/a", several=True) == {"a"}

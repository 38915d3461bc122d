"""Evaluations of episodes, asked again of any weights: those of the run have the
values of its own evaluation.

Method: runs of the simulated engine, whose tokens are a function of weights, seed and position, and
environments whose answers follow from what they were told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.analysis.probes import Probe, Values, opened_probe
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.core.errors import TaskError, UsageError
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.producers.tasks.calls import GroupCall, GroupRewarded, RewardCall, TaskEvent
from tests.support import fork_stage
from tests.support.fork_stage import Puzzles, digest, install
from tests.support.inline_tasks import InlineTasks, failed
from tests.support.recorded_run import RecordedRun

PROMPTS, SAMPLES = 3, 4
DRAWS = PROMPTS * SAMPLES

EVALUATION = {"evaluation__prompts": PROMPTS, "evaluation__group_size": SAMPLES}


class Ranked(Puzzles):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.group = self._together

    def _together(self, call: GroupCall) -> TaskEvent:
        digests = [digest(str(completion.turns)) for completion in call.completions]
        rewards = tuple(float(sorted(digests).index(digest)) for digest in digests)
        return GroupRewarded(
            request=call.request,
            rewards=rewards,
            parts=tuple({"rank": reward} for reward in rewards),
        )


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return fork_stage.record(tmp_path_factory.mktemp("asked") / "run", Puzzles, **EVALUATION)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    together = {"task__kind": "mine:Task", "task__reward": [{"use": "mine:rank", "group": True}]}
    path = tmp_path_factory.mktemp("ranked") / "run"
    return fork_stage.record(path, Ranked, **EVALUATION, **together)


class Asked:
    def __init__(self, run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._stack = monkeypatch, ExitStack()
        self.run: OpenRun = self._stack.enter_context(opened(str(run.directory)))

    def begin(self, tasks: Callable[[], InlineTasks], **facts: Any) -> Probe:
        install(self._monkeypatch, tasks, **facts)
        return self._stack.enter_context(opened_probe(self.run, "eval", None, CommandProgress()))

    def of(self, probe: Probe, version: int, draws: int) -> Values:
        with closing(self.run.tables()) as tables:
            ((digest,),) = tables.query("select digest from versions where version = ?", [version])
        return probe.values(self.run.policies.weights(digest), digest, draws)

    def logged(self, version: int) -> list[float | None]:
        with closing(self.run.tables()) as tables:
            rows = tables.query(
                "select t.reward from groups g join trajectories t using (group_id)"
                " where g.outcome = 'evaluated' and g.version = ? order by g.row, t.sample",
                [version],
            )
        return [entry for (entry,) in rows]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def asked(episodes: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    with closing(Asked(episodes, monkeypatch)) as asked:
        yield asked


@pytest.mark.parametrize("version", [0, 1])
def test_episodes_of_equal_weights_have_the_rewards_that_the_run_gave_them(
    asked: Asked, version: int
) -> None:
    probe = asked.begin(Puzzles)
    result = asked.of(probe, version, DRAWS)
    assert result == asked.logged(version)
    assert len({*result}) == 2


def test_draws_after_the_last_row_have_other_seeds_and_do_not_depend_on_how_they_are_asked(
    asked: Asked,
) -> None:
    probe = asked.begin(Puzzles)
    full = asked.of(probe, 0, 2 * DRAWS + 1)
    assert full[:DRAWS] != full[DRAWS : 2 * DRAWS]
    assert asked.of(probe, 0, 7) == full[:7]


def test_an_evaluation_that_scores_groups_is_refused_by_name(
    ranked: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        closing(Asked(ranked, monkeypatch)) as asked,
        pytest.raises(UsageError, match="scores its trajectories in groups"),
    ):
        asked.begin(Ranked, scores_groups=True)


def without(*lost: int) -> type[Puzzles]:
    calls = iter(range(10_000))

    class Lossy(Puzzles):
        def _score(self, call: RewardCall) -> TaskEvent:
            score = super()._score(call)
            return failed(call, "Retry", "busy") if next(calls) in lost else score

    return Lossy


def test_an_episode_without_a_reward_does_not_count_and_is_said_with_why(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    result = asked.of(asked.begin(without(0, 5)), 0, DRAWS)
    expected = asked.logged(0)
    assert sum(entry is None for entry in result) == 2
    both = zip(result, expected, strict=True)
    assert all(entry is None or entry == other for entry, other in both)
    assert "2 of 12 draws have no valid reward" in (err := capsys.readouterr().err)
    assert "Retry 2" in err


def test_where_no_draw_has_a_reward_nothing_is_decided(asked: Asked) -> None:
    probe = asked.begin(without(*range(100)))
    with pytest.raises(TaskError, match="no draw has a valid reward: Retry 12"):
        asked.of(probe, 0, DRAWS)


def test_an_evaluation_without_rows_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fork_stage.record(tmp_path / "none", Puzzles)
    with closing(Asked(run, monkeypatch)) as asked, pytest.raises(UsageError, match="no rows"):
        asked.begin(Puzzles)

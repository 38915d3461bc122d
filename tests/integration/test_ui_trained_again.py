"""Pages of what made a run worse, and of steps that were trained again beside their source.

Method: a recorded run with what `bisect` leaves and two runs of its steps 5 to 7, one as they were,
one otherwise; asked as the pages ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.audit.bisect import Ask, Version
from dora_pipe.audit.probed_file import FOLDER, VALUES, ProbedFile
from dora_pipe.cli.commands.observe import source_opener
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.core.errors import UsageError
from dora_pipe.observe.web.bisects import bisect_page, listed_bisects
from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.view import parse_query
from tests.support.recorded_run import RecordedRun
from tests.support.rescored import ID, PROBE, bisected, inverted, score
from tests.support.retrained import NAME, commits, retrained
from tests.support.ui_stage import source_of, view_of_log

TRAINED = "select count(*) from groups where fate = 'trained'"
SUSPECTS = ("g0000000003", "g0000000001", "g0000000002", "g0000000004")


@pytest.fixture(scope="module")
def root(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source, steps of it as they were, and with other rewards and without a group."""
    root = tmp_path_factory.mktemp("again")
    source = recorded.copy(root / NAME)
    with source_of(source) as opened, view_of_log(opened) as view:
        rewards = inverted(view.catalogue)
    score(source.directory, *rewards)
    bisected(source.directory, SUSPECTS)
    group, *others = commits(root, NAME)[5].groups
    trained = {one.trajectory for each in others for one in each.trajectories}
    scored = {one.trajectory: one.reward for one in rewards if one.trajectory in trained}
    change = BatchChange(
        without=frozenset({group.group}),
        rewards={name: reward for name, reward in scored.items() if reward is not None},
        weights={others[0].trajectories[0].trajectory: 0.5},
    )
    retrained(root, "again")
    retrained(root, "taken", again=True)
    retrained(root, "other", change=change, overrides=("objective.kl=0.5",))
    return root


def pages(root: Path, name: str) -> Iterator[QueryWorker]:
    with closing(QueryWorker(source_opener(name, root))) as worker:
        worker.read_all()
        yield worker


@pytest.fixture(scope="module")
def source(root: Path) -> Iterator[QueryWorker]:
    yield from pages(root, NAME)


@pytest.fixture(scope="module")
def other(root: Path) -> Iterator[QueryWorker]:
    """Those of the run that is otherwise."""
    yield from pages(root, "other")


def ask(worker: QueryWorker, address: str) -> dict[str, Any]:
    found = (worker.ask(parse_query(address)) for _ in range(200))
    return next(one for one in found if "comparing" not in one)


def test_both_ends_list_each_other(source: QueryWorker, other: QueryWorker) -> None:
    found = ask(source, "/counterfactual")
    assert found["retrained"] == ["again", "other", "taken"]
    assert found["bisects"]["rows"] == [[PROBE, "eval", 3, 2, "the value fell by 0.5"]]
    assert ask(other, "/counterfactual")["retrained"] == [NAME]


def test_steps_as_they_were_stand_beside_their_equals(source: QueryWorker) -> None:
    found = ask(source, "/retrained/again")
    assert (found["run"], found["source"]) == ("again", NAME)
    assert found["facts"]["first other step"] == "none: every step is the same"
    assert [row[:2] for row in found["steps"]["rows"]] == [[at, "the same"] for at in (5, 6, 7)]
    assert found["settings"]["rows"] == found["without"]["rows"] == []
    here, there = found["curves"]["reward"]
    assert here == there and None not in here


def test_batches_that_were_taken_again_are_said_to_be(root: Path, source: QueryWorker) -> None:
    assert ask(source, "/retrained/taken")["facts"]["batches"] == "taken again"
    assert ask(source, "/retrained/again")["facts"]["batches"] == "the source's"
    for worker in pages(root, "taken"):
        trained = worker.work(lambda view: view.rows(TRAINED))
        assert trained == [(sum(len(one.groups) for one in commits(root, "taken")),)]


def test_what_is_otherwise_is_named_with_the_reward_that_it_came_from(
    root: Path, source: QueryWorker, other: QueryWorker
) -> None:
    found = ask(source, "/retrained/other")
    assert found == ask(other, f"/retrained/{NAME}")
    assert found["facts"]["first other step"] == "step 5"
    assert found["facts"]["rescored"] == ID
    differ, words = found["facts"]["another reward"].split(" ", 1)
    assert int(differ) > 10
    assert words.endswith("that were rescored")
    assert found["settings"]["rows"] == [["objective.kl", "0.5"]]
    (left_out,) = found["without"]["rows"]
    assert left_out == [commits(root, NAME)[5].groups[0].group]
    assert found["weights"]["of"] == 1
    here, there = found["curves"]["reward"]
    assert here[0] != there[0]


def test_two_runs_that_have_nothing_to_do_with_each_other_are_refused(root: Path) -> None:
    for worker in pages(root, "again"):
        with pytest.raises(UsageError, match="was trained on the other"):
            ask(worker, "/retrained/other")


def test_a_page_has_values_by_version_suspects_and_trials(source: QueryWorker) -> None:
    found = ask(source, f"/bisect/{PROBE}")
    assert [row[:2] for row in found["versions"]["rows"]] == [[5, 0.9375], [6, 0.4375], [7, 0.375]]
    assert all(low <= value <= high for _, value, low, high, *_ in found["versions"]["rows"])
    assert [row[-1] for row in found["versions"]["rows"]] == [
        "given as good",
        "bad",
        "given as bad",
    ]
    assert [row[0] for row in found["suspects"]["rows"]] == list(SUSPECTS)
    whole, alone = found["trials"]["rows"]
    assert whole[:2] == ["g0000000003, g0000000001, g0000000002 and 1 more", "5 to 6"]
    assert alone[0] == SUSPECTS[0]
    assert found["conclusion"][0] == "the value fell by 0.5"


def test_a_command_that_goes_on_is_shown_as_far_as_it_is(source: QueryWorker, root: Path) -> None:
    folder = root / NAME / FOLDER / PROBE
    kept = {one: one.read_bytes() for one in folder.iterdir()}
    try:
        (folder / "found.json").unlink()
        file = ProbedFile(folder)
        file.read()
        file.add(Ask(subject=Version(4), draws=16), [1.0] * 16)
        found = ask(source, f"/bisect/{PROBE}")
        assert (found["conclusion"], found["suspects"]["rows"]) == ([], [])
        assert found["versions"]["rows"][0][:2] == [4, 1.0]
    finally:
        for one, text in kept.items():
            one.write_bytes(text)


def test_what_cannot_be_read_is_a_line_and_what_is_not_there_is_refused(
    tmp_path: Path, source: QueryWorker
) -> None:
    file = bisected(tmp_path, SUSPECTS)
    (file.folder / VALUES).write_bytes(b"[]\n")
    problems: list[str] = []
    assert listed_bisects(tmp_path, problems)["rows"] == []
    assert "values.jsonl, line 1" in problems[0]
    (file.folder / "about.json").write_bytes(b"{}")
    with pytest.raises(UsageError, match=r"about.json cannot be read"):
        bisect_page(tmp_path, PROBE)
    with pytest.raises(UsageError, match="no probe 'none' was asked"):
        ask(source, "/bisect/none")

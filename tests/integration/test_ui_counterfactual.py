"""Pages of what else could have been: other rewards of a run's texts, where two runs part, what the
turns of a trajectory were worth; served, hidden where they are to be hidden, and in one file.

Method: a recorded run with the files that `rescore` and `fork` leave, beside a copy in which one
reward was forged.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.cli.commands.observe import other_runs, source_opener
from dora_pipe.core.errors import UsageError
from dora_pipe.observe.web import diffs
from dora_pipe.observe.web.diffs import RunDiffs
from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.view import HIDDEN, parse_query
from tests.support import damage
from tests.support.command_line import Call
from tests.support.recorded_run import STEPS, RecordedRun, recorded_in
from tests.support.rescored import ID, TURNS, forked, inverted, score
from tests.support.tamper import Tamper
from tests.support.ui_stage import source_of, view_of_log


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A root with two runs."""

    root: Path
    one: RecordedRun
    name: str
    """Of the trajectory that was continued."""
    differs: str
    """The one that has another reward in the other run."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """The recorded run with what commands left, and one that differs by a reward."""
    root = tmp_path_factory.mktemp("counterfactual")
    recorded = recorded_in(tmp_path_factory.getbasetemp())
    one, two = recorded.copy(root / "one"), recorded.copy(root / "two")
    with Tamper(two) as log:
        differs = damage.forge_evaluation(log)
    with source_of(one) as source, view_of_log(source) as view:
        rewards = inverted(view.catalogue)
        zeros = "from trajectories where reward = 0 and starts_with(trajectory_id, 'g')"
        sql = f"select trajectory_id {zeros} order by 1"
        name = str(view.value(sql))
    score(one.directory, *rewards)
    forked(one.directory, name)
    return Stage(root=root, one=one, name=name, differs=differs)


def opened(stage: Stage, *, redact: bool = False) -> closing[QueryWorker]:
    """The pages of the first run."""
    found = QueryWorker(source_opener("one", stage.root, redact=redact))
    found.read_all()
    return closing(found)


@pytest.fixture(scope="module")
def worker(stage: Stage) -> Iterator[QueryWorker]:
    """The pages of the first run, all its log read."""
    with opened(stage) as found:
        yield found


def ask(worker: QueryWorker, address: str) -> dict[str, Any]:
    return worker.ask(parse_query(address))


def compared(worker: QueryWorker, name: str) -> dict[str, Any]:
    """The page of a comparison, when it has been made."""
    pages = (ask(worker, f"/diff/{name}") for _ in range(200))
    return next(one for one in pages if "comparing" not in one)


def test_a_run_lists_what_else_could_have_been(worker: QueryWorker, stage: Stage) -> None:
    found = ask(worker, "/counterfactual")
    (row,) = found["rescored"]["rows"]
    listed = dict(zip(found["rescored"]["columns"], row, strict=True))
    assert (listed["rescored"], listed["reward"]) == (ID, "new:score")
    assert listed["differ"] > 100
    assert listed["mean now"] == pytest.approx(1 - listed["mean then"], abs=1e-3)
    assert found["forks"]["rows"] == [[stage.name, 7, len(TURNS), 1, 0.94, 0.12]]
    assert (list(found["others"]), found["problems"]) == (["two"], [])


def test_a_page_has_both_rewards_fates_curves_and_examples(worker: QueryWorker) -> None:
    found = ask(worker, f"/rescored/{ID}")
    assert found["reward"] == "new:score"
    assert found["steps"]["at"] == list(range(STEPS))
    assert found["steps"]["new"] == pytest.approx(
        [1 - one for one in found["steps"]["old"]], abs=1e-3
    )
    assert sum(found["steps"]["signs"]) > 0
    first = min(at for at, one in enumerate(found["steps"]["signs"]) if one)
    assert found["facts"]["matters first in"] == f"step {first}"
    assert found["changed"]["of"] == sum(row[-1] for row in found["moves"]["rows"])
    assert len(found["examples"]["rows"]) == 20
    example = dict(zip(found["examples"]["columns"], found["examples"]["rows"][0], strict=True))
    assert abs(example["reward now"] - example["reward then"]) == 1
    assert example["parts now"] == "no 1"
    assert found["evaluations"][0]["at"][0] == 0


def test_a_trajectory_has_the_value_of_its_turns_and_what_other_rewards_say(
    worker: QueryWorker, stage: Stage
) -> None:
    page = ask(worker, f"/trajectory/{stage.name}")
    (values,) = page["values"]
    at = values["columns"].index("value")
    assert [row[at] for row in values["rows"]] == [mean for _, mean, *_ in TURNS]
    assert values["decided"]["turn"] == 1
    assert page["rescored"]["rows"] == [[ID, "new:score", 1.0, '{"no":1.0}', None]]
    other = ask(worker, f"/trajectory/{stage.differs}")
    assert other["values"] == []


def test_two_runs_of_a_root_are_compared_as_the_command_does(
    worker: QueryWorker, stage: Stage, call: Call
) -> None:
    found = compared(worker, "two")
    assert found["names"] == ["recorded", "two"]
    assert found["trajectory"] == stage.differs
    assert "reward, the same text is worth 0.0 and 1.0" in found["words"]["trajectories"]
    code, out, err = call("diff", "one", "two", "--runs", stage.root)
    assert code == 0, err
    said = " ".join(out.split())
    assert all(f"{name} {words}" in said for name, words in found["words"].items())
    assert found["runs"][0]["step"] == list(range(STEPS))
    assert ask(worker, "/diff/two") is found  # it is not made again


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/rescored/nothing", f"there are: {ID}"),
        ("/rescored/..%2Fpolicies", f"there are: {ID}"),
        ("/diff/nowhere", "there are: two"),
        ("/diff/..%2Fone", "there are: two"),
        ("/diff/one", "there are: two"),
    ],
)
def test_what_is_not_there_is_a_line_and_a_hint(
    worker: QueryWorker, address: str, said: str
) -> None:
    with pytest.raises(UsageError) as raised:
        ask(worker, address)
    assert raised.value.hint == said


def test_a_run_that_nothing_was_asked_of_has_empty_pages(recorded: RecordedRun) -> None:
    with closing(QueryWorker(lambda: source_of(recorded))) as worker:
        worker.read_all()
        found = ask(worker, "/counterfactual")
        assert (found["rescored"]["rows"], found["forks"]["rows"], found["others"]) == ([], [], [])
        with pytest.raises(UsageError, match="no other run"):
            ask(worker, "/diff/two")


def test_scores_that_are_being_written_are_read_as_far_as_they_go_and_never_changed(
    copy: RecordedRun,
) -> None:
    with source_of(copy) as source, view_of_log(source) as view:
        rewards = inverted(view.catalogue)
    file = score(copy.directory, *rewards[:100])
    with closing(QueryWorker(lambda: source_of(copy))) as worker:
        worker.read_all()
        with file.rewards.open("ab") as lines:
            lines.write(b'{"trajectory": "g00')
        before = file.rewards.read_bytes()
        assert ask(worker, "/counterfactual")["rescored"]["rows"][0][2] == 100
        assert ask(worker, f"/rescored/{ID}")["facts"]["left out"] != "no group"
        assert file.rewards.read_bytes() == before
        score(copy.directory, *rewards[100:])
        assert ask(worker, "/counterfactual")["rescored"]["rows"][0][2] == len(rewards)
        assert ask(worker, f"/rescored/{ID}")["facts"]["left out"] == "no group"


def test_files_that_cannot_be_read_are_lines_and_the_others_are_shown(copy: RecordedRun) -> None:
    score(copy.directory)
    score(copy.directory, digest="cd" * 32).rewards.write_bytes(b"[]\n")
    forked(copy.directory, "g0000000000-000").write_text("{}")
    with closing(QueryWorker(lambda: source_of(copy))) as worker:
        worker.read_all()
        found = ask(worker, "/counterfactual")
        assert [row[0] for row in found["rescored"]["rows"]] == [ID, "cd" * 6]
        assert len(found["problems"]) == 2
        assert "rewards.jsonl, line 1" in found["problems"][0]
        assert "g0000000000-000-v7.json" in found["problems"][1]
        with pytest.raises(UsageError, match="line 1"):
            ask(worker, f"/rescored/{'cd' * 6}")


def test_redacted_pages_say_numbers_and_no_words_of_a_task(
    stage: Stage, worker: QueryWorker
) -> None:
    with opened(stage, redact=True) as hiding:
        shown, hidden = (ask(one, f"/rescored/{ID}") for one in (worker, hiding))
        found = compared(hiding, "two")
    assert hidden["steps"] == shown["steps"]
    assert "its answer ends with" not in hidden["examples"]["columns"]
    assert "secret" in json.dumps(shown) or "why there is none" not in shown["examples"]["columns"]
    assert "secret" not in json.dumps(hidden)
    assert all(row[1] == HIDDEN for row in found["config"]["rows"] if row[0].startswith("task."))


def test_a_comparison_that_takes_long_says_how_far_it_is_and_ends_with_its_page(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffs, "WAIT_S", 0.0)
    others = other_runs("one", stage.root, "")
    running = RunDiffs("recorded", others)
    found = running.ask("diff", "two", 1)
    assert found["comparing"] == "two"
    running.close()  # and waits for nothing but the record that it reads
    assert running._read <= 1000


def test_file_holds_these_pages_and_what_they_lead_to(
    call: Call, stage: Stage, tmp_path: Path
) -> None:
    path = tmp_path / "run.html"
    words = ("--beside", "two", "--runs", stage.root, "--export", path)
    code, _, err = call("ui", "one", *words)
    assert code == 0, err
    pages = json.loads(path.read_text().partition('id="data">')[2].partition("</script>")[0])
    pages = pages["pages"]
    examples = pages[f"0/rescored/{ID}"]["examples"]["rows"]
    assert pages["0/counterfactual"]["others"] == ["two"]
    assert pages["0/diff/two"]["trajectory"] == stage.differs
    leads_to = [stage.name, stage.differs, *(row[0] for row in examples)]
    assert [one for one in leads_to if f"0/trajectory/{one}" not in pages] == []
    assert pages[f"0/trajectory/{stage.name}"]["values"]
    assert pages[f"0/trajectory/{stage.name}"]["rescored"]["rows"]


def test_a_run_beside_it_from_elsewhere_can_be_compared_too(stage: Stage, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(stage.root / "two", elsewhere)
    others = other_runs("one", stage.root, str(elsewhere))
    assert (list(others.names()), others.beside) == (["two", "elsewhere"], "elsewhere")
    assert other_runs("one", stage.root, "one").beside == ""
    with others.opened("elsewhere") as (_, there):
        assert there.topics.run == "recorded"

"""A run whose tool is answered from another run's log: nobody calls it, and under the same weights
every trajectory is the same, bit for bit; a cassette that was changed is named.

Method: the calculator's example, warmed up, and a run of one step that is sampled twice.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.logged import logged_trajectory
from dora_pipe.catalogue.database import COUNTS, logged_records
from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.trajectory import Trajectory
from tests.support.user_run import assert_clean, call, call_here, warm_calculator

pytestmark = pytest.mark.slow

KIND = """
from dora_pipe.producers.tasks.calculator import CalculatorTask, calculator as real
from pathlib import Path

def calculator(a: int, b: int) -> int:
    \"\"\"Add two numbers, modulo 100.

    Args:
        a: One.
        b: The other.
    \"\"\"
    with Path(__file__).with_name("made").open("a") as made:
        made.write("call\\n")
    return real(a, b)

class Counted(CalculatorTask):
    def tools(self, row):
        return [calculator]
"""
SMALL = (
    *("run.steps=1", "groups.per_step=8", "workers.count=1", "evaluation.prompts=8"),
    *("staleness.max_staleness=0", "task.kind=counted:Counted", "model.path=mine/warm"),
)


def options(*more: str) -> list[str]:
    return [word for one in (*SMALL, *more) for word in ("-o", one)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a run, and one that the first one's log has answered."""
    place = tmp_path_factory.mktemp("taped")
    warm_calculator(tmp_path_factory.getbasetemp(), place)
    (place / "mine" / "counted.py").write_text(KIND)
    words = ["run", "mine/config.toml", *options("run.name=one")]
    assert call(place, *words) == 0, (place / "said").read_text()
    return place


def test_a_strict_run_of_a_log_calls_no_tool_and_samples_the_same(place: Path) -> None:
    made = place / "mine" / "made"
    before = len(made.read_text().split())
    strict = options("run.name=two", "task.cassette=one", "task.cassette_mode=strict")
    assert call(place, "run", "mine/config.toml", *strict) == 0, (place / "said").read_text()
    assert before > 0
    assert len(made.read_text().split()) == before
    one, two = trajectories(place, "one"), trajectories(place, "two")
    first = {name for name, each in one.items() if each.version == 0}
    assert len(first) == 72
    for name in sorted(first):
        assert said(one[name]) == said(two[name]), name
    uses = [two[name].meta.cassette for name in first]
    assert sum(each.answers for each in uses if each is not None) > 0
    assert all(each is not None and each.asked == 0 for each in uses)
    assert_clean(place, "two")


def test_a_tool_that_answers_otherwise_is_named(place: Path) -> None:
    assert call_here(place, "export", "one", "--cassette", "tools.jsonl", "--force") == 0
    assert call_here(place, "audit", "one", "--cassette", "tools.jsonl") == 0
    text = (place / "tools.jsonl").read_text()
    (place / "other.jsonl").write_text(text.replace('"text":"1', '"text":"9'))
    assert call_here(place, "audit", "one", "--cassette", "other.jsonl") == 6
    assert "answers otherwise than on other.jsonl: calculator (" in (place / "said").read_text()


def trajectories(place: Path, name: str) -> dict[str, Trajectory]:
    with opened(str(place / "runs" / name)) as run:
        with closing(run.tables()) as tables:
            left = logged_records(tables, COUNTS)
        records = records_of(run.bus, ends_of(run.bus, run.topics.trajectories))
        found = [
            logged_trajectory(one, left[one.partition, one.offset])
            for one in records
            if (one.partition, one.offset) in left
        ]
    return {one.trajectory: one for one in found}


def said(one: Trajectory) -> tuple[object, ...]:
    """What does not stand once: times, workers, whose answers they were."""
    return (
        list(one.token_ids),
        list(one.logprobs),
        list(one.loss_mask),
        one.reward,
        one.digest,
        one.meta.finish,
        [(each.kind, each.start, each.end, each.tool, each.ok) for each in one.segments],
    )

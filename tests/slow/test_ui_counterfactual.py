"""Pages of what else could have been in a real Chromium: other rewards, two runs, what made it
worse, steps that were trained again, values of turns; served and in a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.cli.commands.observe import source_opener
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.observe.web.export import export_file
from dora_pipe.observe.web.query_worker import QueryWorker
from tests.slow.test_ui_browser import _nothing_goes_wrong, page, served
from tests.support import chromium
from tests.support.chromium import Page
from tests.support.page_checks import unusable
from tests.support.recorded_run import RecordedRun
from tests.support.rescored import ID, PROBE, bisected, forked, inverted, score
from tests.support.retrained import commits, retrained
from tests.support.ui_stage import source_of, view_of_log

__all__ = ["_nothing_goes_wrong", "page"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.found() is None, reason="the pages need chromium, not found on this machine"
    ),
]

TURNED = "g0000000000-000"
PLACES = (
    f"#/0/rescored/{ID}",
    f"#/0/bisect/{PROBE}",
    "#/0/diff/two%20runs",
    "#/0/retrained/again",
    f"#/0/trajectory/{TURNED}",
)


@pytest.fixture(scope="module", params=["address", "file"])
def place(
    page: Page,
    recorded: RecordedRun,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """Where the pages of a run are that was rescored, continued, looked into and trained again, and
    has another beside it."""
    root: Path = tmp_path_factory.mktemp("root")
    one = recorded.copy(root / "one")
    recorded.copy(root / "two runs")
    with source_of(one) as source, view_of_log(source) as view:
        score(one.directory, *inverted(view.catalogue))
    forked(one.directory, TURNED)
    suspects = tuple(group.group for group in commits(root, "one")[5].groups[:3])
    bisected(one.directory, suspects)
    change = BatchChange(without=frozenset(suspects[:1]), weights={f"{suspects[1]}-000": 0.5})
    retrained(root, "again", source="one", change=change)
    with closing(QueryWorker(source_opener("one", root, beside="two runs"))) as worker:
        worker.read_all()
        if request.param == "file":
            path = root / "run.html"
            export_file([worker], path)
            yield path.as_uri()
            return
        with served(worker) as address:
            yield address
            page.leave()


def go(page: Page, place: str) -> None:
    page.go(place)
    page.until("!document.querySelector('main .reading')")
    page.settle()


def test_the_first_page_leads_to_all_of_them_and_back(page: Page, place: str) -> None:
    page.open(place)
    page.click(f"td a[href='#/0/rescored/{ID}']")
    assert page.text("h1") == "Another reward: new:score"
    page.until("document.querySelectorAll('.drawing > svg').length === 3")
    page.click("td a[href^='#/0/trajectory/']")
    assert "What other rewards say of it" in page.text()
    page.click(f"td a[href='#/0/rescored/{ID}']")
    page.open(place)
    page.click("#diffs a[href='#/0/diff/two%20runs']")
    page.until("document.querySelector('dl')?.innerText.includes('configuration')")
    assert page.text("h1") == "Where it parts from two runs"
    assert "the same" in page.text("dl")
    page.open(place)
    page.click(f"td a[href='#/0/bisect/{PROBE}']")
    page.until("document.querySelectorAll('.drawing > svg').length === 2")
    assert "the value fell by 0.5" in page.text("#conclusion")
    page.click("td a[href^='#/0/group/']")
    assert page.text("h1").startswith("Group g")
    page.open(place)
    page.click("#retraineds a")
    page.until("document.querySelector('dl')?.innerText.includes('first other step')")
    assert page.text("h1") == "again: steps of recorded trained again"
    assert "step 5" in page.text("dl")
    page.open(place)
    page.click(f"td a[href='#/0/trajectory/{TURNED}']")
    assert "Turn 1 decided it: 0.94 to 0.12" in page.text()


def test_these_pages_have_names_contrast_tables_and_fit_their_width(page: Page, place: str) -> None:
    for width in (1280, 400):
        page.size(width, 900)
        page.open(place)
        for address in PLACES:
            go(page, address)
            assert unusable(page, width) == {}, address

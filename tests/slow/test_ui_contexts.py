"""The page of an agent's trajectory in a real Chromium: its tree of contexts, its calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.slow.test_ui_browser import _nothing_goes_wrong, _worker, page, served
from tests.support import chromium
from tests.support.branched_run import CONTEXTS, branch
from tests.support.chromium import Page
from tests.support.page_checks import unusable
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Tamper

__all__ = ["_nothing_goes_wrong", "page"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.executable() is None, reason="the pages need chromium, not found on this machine"
    ),
]


@pytest.fixture(scope="module")
def branched(
    recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RecordedRun, str]:
    copied = recorded.copy(tmp_path_factory.mktemp("branched") / "recorded")
    with Tamper(copied) as log:
        return copied, branch(log)


@pytest.fixture(scope="module")
def directory(page: Page, branched: tuple[RecordedRun, str]) -> Iterator[str]:
    run, name = branched
    with closing(_worker(run)) as worker, served(worker) as address:
        yield f"{address}#/trajectory/{name}"
        page.leave()


def test_contexts_stand_below_what_they_go_on_from(page: Page, directory: str) -> None:
    page.open(directory)
    heads = page.run("[...document.querySelectorAll('.context')].map((one) => one.id)")
    assert heads == ["context-0", "context-2", "context-3", "context-1"]
    assert page.run("Boolean(document.querySelector('#context-2 #context-3'))")
    assert "call 1 by planner" in page.text("#context-2")
    assert page.run("document.querySelectorAll('.tokens .t').length") == 45


def test_a_shared_beginning_is_folded_and_leads_to_where_it_stands(
    page: Page, directory: str
) -> None:
    page.open(directory)
    assert not page.run("document.querySelector('#context-3 .shared').open")
    page.click("#context-3 > .shared summary")
    assert len(page.text("#context-3 > .shared .prefix").split()) == CONTEXTS[2].shared
    page.click("#context-3 > .shared button")
    assert page.run("document.activeElement.id") == "context-2"


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_can_be_used_by_all(page: Page, directory: str, width: int) -> None:
    page.size(width, 900)
    page.open(directory)
    assert unusable(page, width) == {}


def test_redacted_contexts_show_no_text(
    page: Page, branched: tuple[RecordedRun, str], tmp_path: Path
) -> None:
    run, name = branched
    with closing(_worker(run, redact=True)) as worker, served(worker) as address:
        page.open(f"{address}#/trajectory/{name}")
        page.run("document.querySelectorAll('.shared').forEach((one) => { one.open = true; })")
        assert set(page.text(".prefix").split()) == {"▒"}
        assert "searcher" not in page.text("body")
        page.leave()

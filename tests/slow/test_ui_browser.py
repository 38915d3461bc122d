"""The pages in a real Chromium: from the first page to a token, by mouse and keyboard, at two
widths; nothing in the console, nothing from elsewhere, readable for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.server import page_server
from tests.support import chromium
from tests.support.chromium import Page
from tests.support.cluster import Cluster, make_config
from tests.support.page_checks import (
    TABLES_EMPTY,
    UNFOLD,
    unusable,
)
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.ui_stage import read_all, source_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.executable() is None, reason="the pages need chromium, not found on this machine"
    ),
]

PLACES = (
    *(f"#/{name}" for name in ("overview", "learning", "speed", "staleness", "workers")),
    "#/steps",
    "#/step/5",
    "#/version/3",
    "#/groups?outcome=trained",
    "#/trajectories?sort=-tokens",
    "#/decisions",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium.browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def _nothing_goes_wrong(page: Page) -> Iterator[None]:
    page.problems.clear()
    page.requested.clear()
    page.size(1280, 900)
    yield
    assert page.problems == []
    own = ("http://127.0.0.1:", "data:", "about:")
    assert [entry for entry in page.requested if not entry.startswith(own)] == []


@contextmanager
def served(worker: QueryWorker) -> Iterator[str]:
    with page_server(worker, port=0) as server:
        yield f"{server.origin}/"


def _worker(recorded: RecordedRun, *, redact: bool = False) -> QueryWorker:
    worker = QueryWorker(
        lambda: source_of(recorded, redact=redact, decode=lambda ids: f"w{ids[0] % 90} ")
    )
    read_all(worker)
    return worker


@pytest.fixture(scope="module")
def address(recorded: RecordedRun) -> Iterator[str]:
    with closing(_worker(recorded)) as worker, served(worker) as result:
        yield result


def test_from_the_first_page_to_a_token_and_back(page: Page, address: str) -> None:
    page.open(address)
    page.settle()
    assert f"{STEPS} of {STEPS} steps" in page.text("h1")
    page.until("document.querySelectorAll('figure svg').length > 3")
    page.click("header a[href='#/steps']")
    assert page.text("h1").startswith("Steps")
    page.click(f"td a[href='#/step/{STEPS - 2}']")
    assert page.text("h1") == f"Step {STEPS - 2}"
    page.run(UNFOLD)
    page.click("td a[href^='#/group/']")
    assert page.text("h1").startswith("Group g")
    page.click("td a[href^='#/trajectory/']")
    assert page.text("h1").startswith("Trajectory g")
    page.click(".said.model .t:last-child")
    assert "log-prob -" in page.text(".chosen")
    page.run("document.querySelector('.shade').value = 'advantage'")
    page.run("document.querySelector('.shade').dispatchEvent(new Event('change'))")
    assert "whole trajectory" in page.text(".shading")
    page.click(f".lineage a[href='#/step/{STEPS - 2}']")
    assert page.text("h1") == f"Step {STEPS - 2}"


def test_lists_are_filtered_by_form_and_by_address(page: Page, address: str) -> None:
    page.open(address + "#/trajectories")
    full = page.text("#range")
    page.run("document.querySelector('#f-outcome').value = 'trained'")
    page.run("document.querySelector('#f-tokens_min').value = '20'")
    page.click(".filters button")
    assert "outcome=trained" in page.run("location.hash")
    assert page.text("#range") not in ("", full)
    assert "outcome trained" in page.text(".same")
    page.run("document.querySelector('#goto').value = '4'")
    page.run("document.querySelector('.goto').requestSubmit()")
    page.until("document.querySelector('h1').innerText === 'Step 4'")


def test_keyboard_alone_leads_to_the_content_and_through_the_tokens(
    page: Page, address: str
) -> None:
    page.open(address)
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    page.go("#/trajectories?outcome=trained&sort=-tokens")
    page.click("td a[href^='#/trajectory/']")
    assert page.run("document.activeElement.tagName") == "H1"
    page.run("document.querySelector('.tokens').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    assert page.text(".chosen").startswith("token 2,")


@pytest.mark.parametrize("width", [1280, 400])
def test_every_page_can_be_used_by_all(page: Page, address: str, width: int) -> None:
    page.size(width, 900)
    page.open(address)
    for location in (*PLACES, "group", "trajectory"):
        if location in ("group", "trajectory"):
            page.go("#/trajectories?outcome=trained&sort=-tokens")
            page.click("td a[href^='#/trajectory/']")
            if location == "group":
                page.click(".lineage a[href^='#/group/']")
        else:
            page.go(location)
        page.until("!document.body.innerText.includes('Reading records.')")
        assert page.text("h1") not in ("", "Not found"), location
        assert unusable(page, width) == {}, location
        assert page.run("document.querySelectorAll('h1').length") == 1
        assert page.run("document.querySelectorAll('main, header').length") == 2


def test_every_chart_has_a_table_with_its_figures(page: Page, address: str) -> None:
    page.open(address)
    page.until("document.querySelectorAll('figure details').length > 3")
    page.until("!document.body.innerText.includes('Reading records.')")
    page.run(UNFOLD)
    page.settle()
    assert page.run(TABLES_EMPTY) == []


def test_redacted_pages_show_no_text(page: Page, recorded: RecordedRun) -> None:
    with closing(_worker(recorded, redact=True)) as worker, served(worker) as address:
        page.open(address + "#/trajectories?outcome=trained")
        page.click("td a[href^='#/trajectory/']")
        assert "Texts are hidden" in page.text()
        assert "null" not in page.text("body")
        assert set(page.text(".words").split()) == {"▒"}
        page.leave()


def test_page_follows_a_run_and_keeps_the_place_of_who_reads(page: Page, tmp_path: Path) -> None:
    config = make_config(run__steps=6, run__name="living")
    with Cluster(tmp_path, config) as cluster:
        cluster.until(lambda: cluster.version >= 2)
        worker = QueryWorker(lambda: source_of(RecordedRun(directory=tmp_path, run="living")))
        with closing(worker), served(worker) as address:
            worker.start()
            page.open(address)
            page.until("document.querySelector('h1').innerText.includes('open, 2 of 6')")
            page.until("document.querySelector('figure details')")
            page.run("document.querySelector('figure details').open = true")
            page.size(1280, 400)
            page.run("window.scrollTo(0, 200)")
            cluster.run()
            page.until("document.querySelector('h1').innerText.includes('finished, 6 of 6')")
            assert page.run("document.querySelector('figure details').open")
            assert page.run("window.scrollY") == 200
            page.leave()

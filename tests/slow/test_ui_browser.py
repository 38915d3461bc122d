"""The pages in a real Chromium: from the first page to a token, by mouse and keyboard, at two
widths, live and as a file; nothing in the console, nothing from elsewhere, readable for all."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dora_pipe.bench.audit_log import LogPlan, config_of, write_log
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.catalogue.reading import FILE
from dora_pipe.config.load import dump_toml
from dora_pipe.observe.web.export import export_file
from dora_pipe.observe.web.overview import overview
from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.server import PageServer
from dora_pipe.observe.web.view import parse_query
from tests.support import chromium
from tests.support.chromium import Page
from tests.support.cluster import Cluster, make_config
from tests.support.page_checks import (
    AXE,
    CONTRAST,
    DASHES,
    LABELS,
    TABLES_EMPTY,
    UNFOLD,
    unusable,
    violations,
)
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.ui_stage import source_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium.found() is None, reason="the pages need chromium, not found on this machine"
    ),
]

FIRST_PAGE_S = 2.0
EXPORT_S = 60.0
READ_S = 120.0
OPEN_S = 1.0
OVERVIEW_S = 0.2
EXPORT_BYTES = 10_000_000
MANY = 100_000
PLACES = (
    "#/overview",
    "#/steps",
    "#/step/5",
    "#/version/3",
    "#/groups?fate=trained",
    "#/trajectories?sort=-tokens",
    "#/decisions",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One tab for all tests of this file."""
    with chromium.browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_goes_wrong(page: Page) -> Iterator[None]:
    """No test leaves an error in the console, or asks anybody else for anything."""
    page.problems.clear()
    page.requested.clear()
    page.size(1280, 900)
    yield
    assert page.problems == []
    own = ("http://127.0.0.1:", "file:///", "data:", "about:")
    assert [one for one in page.requested if not one.startswith(own)] == []


@contextmanager
def served(worker: QueryWorker) -> Iterator[str]:
    """The address of a server of its pages."""
    with PageServer(worker, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.address
        finally:
            server.shutdown()
            thread.join()


def _worker(recorded: RecordedRun, *, redact: bool = False) -> QueryWorker:
    worker = QueryWorker(
        lambda: source_of(recorded, redact=redact, decode=lambda ids: f"w{ids[0] % 90} ")
    )
    worker.read_all()
    return worker


@pytest.fixture(scope="module")
def address(recorded: RecordedRun) -> Iterator[str]:
    with closing(_worker(recorded)) as worker, served(worker) as found:
        yield found


@pytest.fixture(scope="module")
def file(recorded: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("file") / "run.html"
    with closing(_worker(recorded)) as worker:
        export_file(worker, path)
    return path.as_uri()


@pytest.mark.parametrize("kind", ["address", "file"])
def test_from_the_first_page_to_a_token_and_back(
    page: Page, request: pytest.FixtureRequest, kind: str
) -> None:
    page.open(request.getfixturevalue(kind))
    page.settle()
    assert f"{STEPS} of {STEPS} steps" in page.text("h1")
    page.until("document.querySelectorAll('figure svg').length > 10")
    page.click("header a[href='#/steps']")
    assert page.text("h1") == "Steps"
    page.click(f"td a[href='#/step/{STEPS - 2}']")
    assert page.text("h1") == f"Step {STEPS - 2}"
    page.click("td a[href^='#/group/']")
    assert page.text("h1").startswith("Group g")
    page.click("td a[href^='#/trajectory/']")
    assert page.text("h1").startswith("Trajectory g")
    page.click(".tokens .t:last-child")
    assert "log-prob -" in page.text("#chosen")
    page.click("input[value='advantage']")
    assert "whole trajectory" in page.text("#shading")
    page.click(f".lineage a[href='#/step/{STEPS - 2}']")
    assert page.text("h1") == f"Step {STEPS - 2}"


@pytest.mark.parametrize("kind", ["address", "file"])
def test_lists_are_filtered_by_form_and_by_address(
    page: Page, request: pytest.FixtureRequest, kind: str
) -> None:
    page.open(request.getfixturevalue(kind) + "#/trajectories")
    whole = page.text("#range")
    page.run("document.querySelector('#f-fate').value = 'trained'")
    page.run("document.querySelector('#f-tokens_min').value = '20'")
    page.click(".filters button")
    assert "fate=trained" in page.run("location.hash")
    assert page.text("#range") not in ("", whole)
    second = "document.querySelectorAll('tbody tr td:nth-child(2)')"
    fates = page.run(f"[...{second}].map((one) => one.innerText)")
    assert set(fates) == {"trained"}
    page.run("document.querySelector('#goto').value = '4'")
    page.run("document.querySelector('.goto').requestSubmit()")
    page.until("document.querySelector('h1').innerText === 'Step 4'")


def test_keyboard_alone_leads_to_the_content_and_through_the_tokens(
    page: Page, address: str
) -> None:
    page.open(address)
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    page.go("#/trajectories?fate=trained&sort=-tokens")
    page.click("td a[href^='#/trajectory/']")
    assert page.run("document.activeElement.tagName") == "H1"
    page.run("document.querySelector('.tokens').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    assert page.text("#chosen").startswith("token 2,")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("kind", ["address", "file"])
def test_every_page_can_be_used_by_all(
    page: Page, request: pytest.FixtureRequest, kind: str, width: int
) -> None:
    page.size(width, 900)
    page.open(request.getfixturevalue(kind))
    for place in (*PLACES, "group", "trajectory"):
        if place in ("group", "trajectory"):
            page.go("#/trajectories?fate=trained&sort=-tokens")
            page.click("td a[href^='#/trajectory/']")
            if place == "group":
                page.click(".lineage a[href^='#/group/']")
        else:
            page.go(place)
        page.until("!document.body.innerText.includes('Records are being read.')")
        assert page.text("h1") not in ("", "Not there"), place
        assert unusable(page, width) == {}, place
        assert page.run("document.querySelectorAll('h1').length") == 1
        assert page.run("document.querySelectorAll('main, header').length") == 2


def test_what_these_tests_look_for_is_found_where_it_is(page: Page, address: str) -> None:
    page.open(address)
    page.run("console.error('planted')")
    page.run("fetch('http://planted.example/').catch(() => 0)")
    page.run("document.querySelector('main').append(document.createElement('input'))")
    page.run("document.querySelector('h1').style.color = '#ccc'")
    assert len(page.run(LABELS)) == 1
    assert len(page.run(CONTRAST)) == 1
    assert any("planted" in one for one in page.problems)
    assert any("Content Security Policy" in one for one in page.problems), page.problems
    page.problems.clear()
    page.requested.clear()


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not there: make axe")
def test_what_axe_is_asked_for_is_found_where_it_is(page: Page, address: str) -> None:
    page.open(address)
    assert violations(page) == []
    planted = "Object.assign(document.createElement('div'), {role: 'region', ariaLabel: 'twice'})"
    for _ in range(2):
        page.run(f"document.querySelector('main').append({planted})")
    page.run("document.querySelector('main').append(document.createElement('input'))")
    assert {one.split(":")[0] for one in violations(page)} == {"label", "landmark-unique"}


def test_regions_of_one_caption_have_names_of_their_own(page: Page, address: str) -> None:
    page.open(address)
    named = "['Steps', 'Steps', 'Steps (2)'].map((one) => dom.region(one, {}).ariaLabel)"
    drawn = f"import('/static/dom.js').then((dom) => (dom.newPage(), {named}))"
    assert page.run(drawn) == ["Steps", "Steps (2)", "Steps (2) (2)"]


def test_every_chart_has_a_table_with_its_figures(page: Page, address: str) -> None:
    page.open(address)
    page.until("document.querySelectorAll('figure details').length > 10")
    page.until("!document.body.innerText.includes('Records are being read.')")
    page.run(UNFOLD)
    page.settle()
    assert page.run(TABLES_EMPTY) == []


def test_areas_differ_in_pattern_where_they_differ_in_colour(page: Page, address: str) -> None:
    page.open(address)
    page.until("document.querySelectorAll('.timeline rect').length > 5")
    fills = page.run(
        "[...document.querySelectorAll('.timeline rect')].map((one) => one.getAttribute('fill'))"
    )
    assert any(one.startswith("url(") for one in fills)
    assert any(one.startswith("#") for one in fills)
    dashes = page.run(DASHES)
    assert dashes and all(len(set(one)) == len(one) for one in dashes)


def test_redacted_pages_show_no_text(page: Page, recorded: RecordedRun) -> None:
    with closing(_worker(recorded, redact=True)) as worker, served(worker) as address:
        page.open(address + "#/trajectories?fate=trained")
        page.click("td a[href^='#/trajectory/']")
        assert "Texts are hidden" in page.text()
        assert "null" not in page.text("body")
        assert set(page.text(".tokens").split()) == {"▒"}
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
            page.run("window.scrollTo(0, 200)")
            cluster.run()
            page.until("document.querySelector('h1').innerText.includes('finished, 6 of 6')")
            assert page.run("document.querySelector('figure details').open")
            assert page.run("window.scrollY") == 200
            page.leave()


@pytest.mark.alone("it measures how long a page, an export and an overview take")
def test_run_of_a_hundred_thousand_trajectories(
    page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = LogPlan(trajectories=MANY, tokens=8, run="many")
    with closing(SqliteBus(tmp_path / "log.sqlite")) as bus:
        assert write_log(bus, plan).trajectories >= MANY
    (tmp_path / "config.toml").write_text(dump_toml(config_of(plan)))
    recorded = RecordedRun(directory=tmp_path, run="many")
    began_s = time.monotonic()
    with closing(QueryWorker(lambda: source_of(recorded))) as worker, served(worker) as address:
        worker.start()
        page.open(address)
        first_s = time.monotonic() - began_s
        assert page.run("document.querySelectorAll('main h1').length") == 1
        page.until("document.querySelector('h1').innerText.includes('finished')", READ_S)
        page.until("!document.querySelector('main .reading')")
        page.leave()
    path = tmp_path / "many.html"
    began_s = time.monotonic()
    with closing(QueryWorker(lambda: source_of(recorded))) as worker:
        worker.read_all()
        done = export_file(worker, path)
    export_s = time.monotonic() - began_s
    page.open(path.as_uri())
    page.until("document.querySelectorAll('figure svg').length > 8")
    open_s, overview_s = _reopened(recorded, tmp_path / FILE)
    figures = (
        f"first page {first_s:.2f} s, export {export_s:.1f} s, {done.bytes / 1e6:.1f} MB, "
        f"opened again {open_s:.2f} s, overview {overview_s * 1e3:.0f} ms"
    )
    with capsys.disabled():
        sys.stdout.write(f"\n100 000 trajectories: {figures}\n")
    assert first_s < FIRST_PAGE_S, figures
    assert export_s < EXPORT_S, figures
    assert done.bytes < EXPORT_BYTES, figures
    assert open_s < OPEN_S, figures
    assert overview_s < OVERVIEW_S, figures


def _reopened(recorded: RecordedRun, path: Path) -> tuple[float, float]:
    """Seconds until the kept tables of a run answer, and of an overview of them."""
    with closing(QueryWorker(lambda: source_of(recorded, catalogue=path))) as worker:
        worker.read_all()
    assert path.is_file()
    began_s = time.monotonic()
    with closing(QueryWorker(lambda: source_of(recorded, catalogue=path))) as worker:
        worker.read_all()
        worker.ask(parse_query("/run"))
        open_s = time.monotonic() - began_s
        spent = []
        for _ in range(5):
            began_s = time.monotonic()
            worker.work(overview)
            spent.append(time.monotonic() - began_s)
    return open_s, min(spent)

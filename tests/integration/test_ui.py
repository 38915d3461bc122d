"""The pages on the log of an eventful run: they agree with audit's own books, hide what is to be
hidden, follow a run that goes on, and fit into one file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.errors import UsageError
from dora_pipe.history.audit import build_ledger
from dora_pipe.ui.asking import question
from dora_pipe.ui.book import Book
from dora_pipe.ui.desk import Desk
from dora_pipe.ui.mismatch import mismatch
from dora_pipe.ui.overview import overview
from dora_pipe.ui.pages import HIDDEN, Source, group_page, step_page, trajectory_page, version_page
from dora_pipe.ui.sampled import sampled_times
from tests.support.cluster import Cluster, make_config
from tests.support.command_line import Call, caller
from tests.support.recorded_run import STEPS, RecordedRun, recorded_in
from tests.support.ui_stage import book_of, source_of

LIMIT_BYTES = 10_000_000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The session's run, not to be changed."""
    return recorded_in(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def source(recorded: RecordedRun) -> Iterator[Source]:
    """Its log, with a tokenizer that names each token."""
    with source_of(recorded, decode=lambda ids: "".join(f"<{one}>" for one in ids)) as found:
        yield found


@pytest.fixture(scope="module")
def book(source: Source) -> Book:
    """Everything that its log says."""
    return book_of(source)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command line: exit code, stdout, stderr."""
    return caller(monkeypatch, capsys)


def test_book_says_of_every_trajectory_what_audit_says(book: Book, source: Source) -> None:
    ledger = build_ledger(source.bus, source.topics)
    assert set(book.groups) == set(ledger.accounts.groups)
    for name, group in ledger.accounts.groups.items():
        own = book.groups[name]
        assert (own.fate, own.version) == (group.fate or "open", group.spec.version), name
        assert (own.step if own.fate == "trained" else None) == group.step, name
        for trajectory, entry in group.requests.items():
            row = book.trajectories[trajectory]
            place = None if entry.bound is None else entry.bound.place
            assert (None if row.offset < 0 else (row.partition, row.offset)) == place, trajectory
            assert [one.attempt for one in row.placements] == [
                one.attempt for one in entry.placements
            ]
    bound = sum(one.standing == "bound" for one in ledger.accounts.logged.values())
    assert book.not_counting == ledger.accounts.records - bound


def test_overview_has_every_step_and_every_group(book: Book) -> None:
    found = overview(book)
    assert found["run"]["state"] == "finished"
    assert found["reward"]["step"] == list(range(STEPS))
    assert max(found["staleness"]["high"]) <= max(found["staleness"]["bound"])
    totals = found["totals"]
    assert sum(totals["group_fates"].values()) + totals["open"] == len(book.groups)
    assert {row["worker"] for row in found["timeline"]["rows"]} == {"w0", "w1", "w2"}
    assert totals["not_counting"] > 0
    assert len(msgspec.json.encode(found)) < 200_000


def test_requests_that_are_over_are_on_no_worker(book: Book) -> None:
    assert all(row.running < 0 for row in book.trajectories.values() if row.offset >= 0)


def test_lineage_leads_from_a_trajectory_to_its_step_and_back(book: Book, source: Source) -> None:
    name = book.steps[5].groups[0]
    sibling = f"{name}-000"
    page = trajectory_page(book, source, question(f"/trajectory/{sibling}"))
    assert page["lineage"]["step"] == 5
    step = step_page(book, source, question("/step/5"))
    assert name in [row[0] for row in step["groups"]["rows"]]
    version = version_page(book, source, question(f"/version/{page['lineage']['version']}"))
    assert 5 in dict(version["steps"])
    group = group_page(book, source, question(f"/group/{name}"))
    assert sibling in [row[0] for row in group["siblings"]["rows"]]
    assert group["lineage"] == page["lineage"]


def test_tokens_have_what_the_log_has_of_each(book: Book, source: Source) -> None:
    name = f"{book.steps[3].groups[0]}-000"
    record = trajectory_page(book, source, question(f"/trajectory/{name}"))["record"]
    tokens = record["tokens"]
    assert {len(tokens[one]) for one in ("ids", "text", "mask", "logprob", "sampler")} == {
        tokens["total"]
    }
    assert tokens["text"][0] == f"<{tokens['ids'][0]}>"
    assert [one is not None for one in tokens["logprob"]] == [bool(one) for one in tokens["mask"]]
    part = trajectory_page(book, source, question(f"/trajectory/{name}?from=2"))["record"]
    assert part["tokens"]["ids"] == tokens["ids"][2:]


def test_redaction_hides_ids_texts_and_what_tasks_said(
    book: Book, recorded: RecordedRun, source: Source
) -> None:
    invalid = next(
        one for one in book.trajectories.values() if one.offset >= 0 and one.reward is None
    )
    asked = question(f"/trajectory/{invalid.trajectory}")
    shown = trajectory_page(book, source, asked)
    with source_of(recorded, redact=True, decode=lambda ids: "secret") as hiding:
        hidden = trajectory_page(book, hiding, asked)
    assert shown["record"]["reward_error"] not in (None, HIDDEN)
    assert hidden["record"]["reward_error"] == HIDDEN
    assert hidden["record"]["tokens"]["ids"] is None
    assert hidden["record"]["tokens"]["text"] is None
    assert hidden["record"]["tokens"]["logprob"] == shown["record"]["tokens"]["logprob"]
    assert "secret" not in json.dumps(hidden)
    assert shown["record"]["reward_error"] not in json.dumps(hidden)


@pytest.mark.parametrize(
    ("address", "page"),
    [
        ("/step/999", step_page),
        ("/step/x", step_page),
        ("/group/g0000099999", group_page),
        ("/trajectory/g0000099999-000", trajectory_page),
        ("/version/999", version_page),
    ],
)
def test_what_is_not_there_is_a_line(book: Book, source: Source, address: str, page: Any) -> None:
    with pytest.raises(UsageError):
        page(book, source, question(address))


def test_mismatch_and_times_come_from_records_and_contributions(book: Book, source: Source) -> None:
    found = mismatch(book, source)
    assert found["looked"] == found["steps"] == STEPS
    assert sampled_times(book, source)["sampled"] > 0


def test_desk_answers_while_it_reads_and_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    config = make_config(run__steps=6, run__name="living")
    with Cluster(tmp_path, config) as cluster:
        cluster.until(lambda: cluster.version >= 2)
        recorded = RecordedRun(directory=tmp_path, run="living")
        desk = Desk(lambda: source_of(recorded))
        try:
            desk.start()
            assert desk.ask(question("/run"))["name"] == "living"
            desk.read_all()
            before = desk.ask(question("/overview"))
            assert (before["run"]["state"], before["run"]["read"]) == ("open", 1.0)
            cluster.until(lambda: cluster.version >= 4)
            _until_steps(desk, 4)
            cluster.run()
            _until_steps(desk, 6)
            after = desk.ask(question("/overview"))
            assert after["run"]["state"] == "finished"
            assert len(after["reward"]["step"]) == 6
        finally:
            desk.close()


def _until_steps(desk: Desk, steps: int) -> None:
    """Ask until so many are there: a desk looks for news now and then."""
    for _ in range(2000):
        desk._looked_s = 0.0
        if desk.ask(question("/run"))["steps"] >= steps:
            return
    pytest.fail(f"the desk never saw {steps} steps")


def test_desk_says_why_a_log_cannot_be_opened(tmp_path: Path) -> None:
    def no_log() -> Any:
        raise UsageError("there is none")

    with pytest.raises(UsageError):
        Desk(no_log)


def test_file_holds_pages_that_hang_together(
    call: Call, recorded: RecordedRun, tmp_path: Path
) -> None:
    path = tmp_path / "run.html"
    code, _, err = call("ui", recorded.directory, "--export", path)
    assert code == 0, err
    assert path.stat().st_size < LIMIT_BYTES
    page = path.read_text()
    pages = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["pages"]
    assert pages["0/overview"]["run"]["steps"] == STEPS
    assert pages["0/steps"]["of"] == STEPS
    step = pages[f"0/step/{STEPS - 1}"]
    held = [row[0] for row in step["groups"]["rows"] if f"0/group/{row[0]}" in pages]
    assert held
    siblings = pages[f"0/group/{held[0]}"]["siblings"]["rows"]
    assert any(f"0/trajectory/{row[0]}" in pages for row in siblings)


def test_file_of_a_redacted_run_holds_no_ids(
    call: Call, recorded: RecordedRun, tmp_path: Path
) -> None:
    path = tmp_path / "run.html"
    assert call("ui", recorded.directory, "--redact", "--export", path)[0] == 0
    pages = json.loads(path.read_text().partition('id="data">')[2].partition("</script>")[0])
    told = [one for name, one in pages["pages"].items() if "/trajectory/" in name]
    assert told
    assert all(one["record"].get("tokens", {}).get("ids") is None for one in told)


def test_two_runs_and_a_replay_are_in_one_file(
    call: Call, recorded: RecordedRun, tmp_path: Path
) -> None:
    lines = tmp_path / "replay.jsonl"
    lines.write_text(_replay_line())
    path = tmp_path / "both.html"
    words = ("--beside", recorded.directory, "--replay", lines, "--export", path)
    code, _, err = call("ui", recorded.directory, *words)
    assert code == 0, err
    pages = json.loads(path.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert [one["replay"] for one in pages["pages"]["runs"]["runs"]] == [True, False]
    assert pages["pages"]["1/overview"] == pages["pages"]["0/overview"]


def _replay_line() -> str:
    return json.dumps(
        {
            "step": 0,
            "wanted": True,
            "equal": True,
            "digest_committed": "a",
            "digest_replayed": "a",
            "tensor": "",
            "compute_s_committed": 1.0,
            "compute_s_replayed": 1.0,
        }
    )


def test_archive_of_a_run_is_looked_at_as_the_run_is(
    call: Call, recorded: RecordedRun, tmp_path: Path
) -> None:
    own = recorded.copy(tmp_path / "own")
    kept = tmp_path / "kept"
    code, _, err = call("archive", own.directory, "--to", kept)
    assert code == 0, err
    path = tmp_path / "archive.html"
    code, _, err = call("ui", kept, "--export", path)
    assert code == 0, err
    pages = json.loads(path.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert pages["pages"]["0/overview"]["run"]["steps"] == STEPS


@pytest.mark.parametrize(
    ("words", "said"),
    [(("nothing",), "no run"), (("--port", "99999"), "--port"), (("--replay", "none"), "replay")],
)
def test_what_cannot_be_shown_is_one_line(
    call: Call, recorded: RecordedRun, words: tuple[str, ...], said: str
) -> None:
    run = [] if words == ("nothing",) else [recorded.directory]
    code, _, err = call("ui", *run, *words)
    assert (code, said in err) == (2, True), err

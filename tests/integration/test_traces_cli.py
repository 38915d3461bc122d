"""Traces by the command line: printed from the log alone, sent to a real endpoint, to a file."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.config.load import load_config
from dora_pipe.launch.roles import traces
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.observe.traces import names
from dora_pipe.observe.traces.span import Span
from tests.support.command_line import Call, caller
from tests.support.ledgers import build_ledger
from tests.support.otlp_endpoint import OtlpEndpoint
from tests.support.recorded_run import STEPS, RecordedRun, recorded_in
from tests.support.traces import check_whole, traces_of

GROUP = "g0000000010"


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> RecordedRun:
    return recorded_in(tmp_path_factory.getbasetemp()).copy(tmp_path / "recorded")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.setenv("COLUMNS", "200")
    return caller(monkeypatch, capsys)


def _spans(recorded: RecordedRun) -> list[Span]:
    with closing(recorded.open()) as bus:
        return traces_of(bus, recorded.topics)


def _ids(spans: list[Span]) -> list[tuple[str, str, str, int, int]]:
    return [(span.trace_id, span.span_id, span.stage, span.start_ns, span.end_ns) for span in spans]


def test_endpoint_receives_every_trained_trajectory_whole(
    recorded: RecordedRun, call: Call, tmp_path: Path
) -> None:
    with OtlpEndpoint() as endpoint:
        words = ("export", "traces", recorded.directory, endpoint.address)
        code, out, err = call(*words)
        spans = endpoint.spans
        resources = endpoint.resources()
    assert (code, out) == (0, ""), err
    assert f"{len(spans)} spans" in err
    assert _ids(spans) == _ids(_spans(recorded))
    check_whole(spans)
    assert {resource["dora.run"] for resource in resources} == {"recorded"}
    assert {resource["service.name"] for resource in resources} == {"dora-pipe"}
    with closing(recorded.open()) as bus:
        ledger = build_ledger(bus, recorded.topics)
    steps = {span.attributes[names.STEP]: span for span in spans if span.stage == "step"}
    own = {span.attributes[names.TRAJECTORY]: span for span in spans if span.stage == "trajectory"}
    trained = 0
    for step in ledger.steps.values():
        linked = {link.span_id for link in steps[step.step].links}
        for group in step.fact.groups:
            for taken in group.trajectories:
                assert own[taken.trajectory].span_id in linked
                trained += 1
    assert trained == STEPS * 4 * 4


def test_endpoint_that_refuses_is_told_in_one_line(recorded: RecordedRun, call: Call) -> None:
    with OtlpEndpoint(refuse=10**6, status=400) as endpoint:
        code, out, err = call("export", "traces", recorded.directory, endpoint.address)
    assert (code, out) == (7, "")
    assert err.splitlines()[-2:] == [
        f"error: {endpoint.address}/v1/traces does not take traces (400 Bad Request)",
        "hint: is that an OTLP endpoint? an address without a path gets /v1/traces",
    ]


def test_address_where_nobody_answers_is_told_in_one_line(
    recorded: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.observe.traces.sinks.TIMEOUT_S", 0.5)
    code, _, err = call("export", "traces", recorded.directory, "http://127.0.0.1:1")
    assert code == 7
    assert "error: no answer from http://127.0.0.1:1/v1/traces" in err
    assert "hint: is a collector listening there?" in err


@pytest.mark.parametrize("follow", [(), ("--follow",)], ids=["whole", "follow"])
def test_busy_backend_is_asked_again(
    follow: tuple[str, ...], recorded: RecordedRun, call: Call
) -> None:
    with OtlpEndpoint(refuses=lambda asked: (503, "0") if asked < 3 else None) as endpoint:
        code, _, err = call("export", "traces", recorded.directory, endpoint.address, *follow)
        assert code == 0, err
        assert _ids(endpoint.spans) == _ids(_spans(recorded)), "none twice, none left out"


def test_what_was_sent_is_not_sent_again_when_the_command_is_repeated(
    recorded: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.observe.traces.sinks.TIMEOUT_S", 5.0)
    own = recorded
    full = [True]
    with OtlpEndpoint(
        refuses=lambda asked: (503, "60") if asked > 7 and full else None
    ) as endpoint:
        words = ("export", "traces", own.directory, endpoint.address)
        code, _, err = call(*words)
        assert code == 7 and len(endpoint.requests) == 7
        assert "(503 Service Unavailable)" in err and "continues where" in err
        full.clear()
        code, _, err = call(*words)
        assert code == 0, err
        assert "earlier traces are not sent again" in err
        assert _ids(endpoint.spans) == _ids(_spans(recorded))
        sent = len(endpoint.requests)
        code, _, err = call(*words)
        assert (code, len(endpoint.requests)) == (0, sent)
        assert ": 0 groups, 0 spans" in err
        (path,) = (own.directory / "traces-sent").iterdir()
        assert any(line.endswith(f"to send all, remove {path}") for line in err.splitlines())
        path.unlink()
        assert call(*words)[0] == 0 and len(endpoint.requests) == 2 * sent
        code, _, err = call(*words, "--ratio", "0.5")
        assert "left out by their share" in err
        assert len(endpoint.requests) > 2 * sent, "another share is another errand"


def test_file_holds_the_same_a_request_a_line(
    recorded: RecordedRun, call: Call, tmp_path: Path
) -> None:
    path = tmp_path / "traces.jsonl"
    code, _, err = call("export", "traces", recorded.directory, path)
    assert code == 0, err
    lines = [
        span
        for line in path.read_text().splitlines()
        for each in json.loads(line)["resourceSpans"]
        for scope in each["scopeSpans"]
        for span in scope["spans"]
    ]
    assert [row["spanId"] for row in lines] == [span.span_id for span in _spans(recorded)]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("t.jsonl", "--follow"), "--follow sends to an address"),
        (("http://", "--follow"), "no address of an OTLP endpoint"),
        ((), "Missing argument"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    recorded: RecordedRun, call: Call, words: tuple[str, ...], text: str
) -> None:
    code, _, err = call("export", "traces", recorded.directory, *words)
    assert code == 2
    assert text in err


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (GROUP, ("├─ trajectory", "│  ├─ generated", "└─ trained", "trained at step")),
        (f"{GROUP}-001", ("│  └─ published", f"{GROUP}-001; ", "├─ group_wait")),
        ("6", ("├─ batch_wait", "waited for g", "last came g")),
    ],
)
def test_show_prints_the_tree_from_the_log_alone(
    recorded: RecordedRun, call: Call, expected: str, says: tuple[str, ...]
) -> None:
    code, out, err = call("show", recorded.directory, expected, "--all")
    assert code == 0, err
    tree = out.partition("trace\n")[2] or out.partition("\ntrace")[2]
    for words in says:
        assert words in tree, tree
    assert (f"{GROUP}-000; " in tree) == (expected == GROUP)


def test_show_gives_ids_as_json(recorded: RecordedRun, call: Call) -> None:
    code, out, _ = call("show", recorded.directory, GROUP, "--json")
    assert code == 0
    rows = json.loads(out)["trace"]
    spans = {(span.trace_id, span.span_id): span for span in _spans(recorded)}
    assert rows[0]["stage"] == "group"
    for row in rows:
        assert spans[row["trace_id"], row["span_id"]].stage == row["stage"]


@pytest.mark.parametrize("follow", [False, True])
def test_spans_that_the_endpoint_rejects_are_not_counted_as_sent(
    recorded: RecordedRun, call: Call, follow: bool
) -> None:
    with OtlpEndpoint() as endpoint:
        endpoint.rejects = 2
        words = ("export", "traces", recorded.directory, endpoint.address)
        code, _, err = call(*words, *(["--follow"] if follow else []))
        spans, rejected = len(endpoint.spans), 2 * len(endpoint.requests)
    assert code == 0, err
    assert f", {spans - rejected} spans, {rejected} rejected by the endpoint: quota" in err


def test_follower_of_a_run_sends_what_is_configured(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    niceness: list[int] = []
    monkeypatch.setattr(os, "nice", niceness.append)
    own = recorded.copy(tmp_path / "run")
    with OtlpEndpoint() as endpoint:
        expected = [f"telemetry.traces={endpoint.address}"]
        config = load_config(own.directory / "config.toml", expected)
        traces(RunDir(own.directory), config, lambda: False)
        spans = endpoint.spans
    assert any(span.stage == "group" for span in spans)
    assert len([span for span in spans if span.stage == "step"]) == STEPS
    assert int((own.directory / "traces.sent").read_text()) > 0
    assert niceness == [5]

"""Tests that JSON lines and OTLP requests of spans agree."""

from __future__ import annotations

import base64
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dora_pipe.core.errors import UsageError
from dora_pipe.ledger.account import GroupEnded, StepEnded
from dora_pipe.observe.traces import sinks
from dora_pipe.observe.traces.ids import RunFacts
from dora_pipe.observe.traces.sinks import (
    LINKS_MAX,
    SPANS_MAX,
    FileSink,
    HttpSink,
    NotTaken,
    address_of,
    pieces,
)
from dora_pipe.observe.traces.span import Link, Span
from dora_pipe.observe.traces.spans import group_spans, step_spans
from tests.support.account_stage import contents, whole
from tests.support.otlp_endpoint import OtlpEndpoint, spans_of
from tests.support.tidy import ROOT

GOLDEN = ROOT / "tests" / "golden" / "traces" / "group-and-step.json"


def _all() -> tuple[RunFacts, list[Span]]:
    stage = whole()
    run, (group, step) = stage.run, stage.ended
    assert run is not None
    assert isinstance(group, GroupEnded)
    assert isinstance(step, StepEnded)
    spans = group_spans(run, group, contents())
    return run, [*spans, *step_spans(run, step)]


def _request(line: bytes) -> ExportTraceServiceRequest:

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        return {
            key: base64.b64encode(bytes.fromhex(entry)).decode()
            if key in ("traceId", "spanId", "parentSpanId")
            else plain(entry)
            for key, entry in value.items()
        }

    request = ExportTraceServiceRequest()
    json_format.ParseDict(plain(json.loads(line)), request)
    return request


def test_a_file_is_as_it_was(tmp_path: Path) -> None:
    run, spans = _all()
    with FileSink(tmp_path / "traces.jsonl") as sink:
        sink.send(run, spans)
    (line,) = (tmp_path / "traces.jsonl").read_text().splitlines()
    assert json.loads(line) == json.loads(GOLDEN.read_text())


def test_line_of_json_and_request_of_the_exporter_hold_the_same_spans(tmp_path: Path) -> None:
    run, spans = _all()
    with FileSink(tmp_path / "traces.jsonl") as sink, OtlpEndpoint() as endpoint:
        sink.send(run, spans)
        with closing(HttpSink(endpoint.address)) as http:
            http.send(run, spans)
        assert endpoint.spans == spans
        (resource,) = endpoint.resources()
        assert resource["dora.run"] == "told" and resource["service.name"] == "dora-pipe"
    (line,) = (tmp_path / "traces.jsonl").read_bytes().splitlines()
    assert _request(line) == endpoint.requests[0]


@pytest.mark.parametrize(
    ("status", "says", "hint"),
    [
        (400, "does not take traces (400 Bad Request)", "is that an OTLP endpoint?"),
        (401, "does not take traces (401 Unauthorized)", "OTEL_EXPORTER_OTLP_HEADERS"),
        (503, "does not take traces (503 Service Unavailable)", "continues where"),
    ],
)
def test_an_endpoint_that_refuses_is_named_with_a_hint(
    status: int, says: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "TIMEOUT_S", 0.5)  # shorter than the exporter's first wait
    run, spans = _all()
    refuse = OtlpEndpoint(refuses=lambda asked: (status, "") if asked > 1 else None)
    with refuse as endpoint, closing(HttpSink(endpoint.address)) as http:
        http.send(run, spans[:3])
        with pytest.raises(NotTaken, match=re.escape(says)) as failed:
            http.send(run, spans)
    assert failed.value.taken == 0 and hint in (failed.value.hint or "")


def test_requests_are_bounded_by_spans_and_by_links() -> None:
    entry = _all()[1][0]
    many = [entry] * (SPANS_MAX + 1)
    assert [len(few) for few in pieces(many)] == [SPANS_MAX, 1]
    link = Link(entry.trace_id, entry.span_id)
    step = Span(
        stage="step",
        trace_id=entry.trace_id,
        span_id=entry.span_id,
        parent_id="",
        start_ns=0,
        end_ns=0,
        links=(link,) * (LINKS_MAX // 2 + 1),
    )
    assert [len(few) for few in pieces([entry, step, step, entry])] == [2, 2]
    assert list(pieces([])) == []


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("http://h:4318/", "http://h:4318/v1/traces"),
        ("https://h/otlp/v1/traces", "https://h/otlp/v1/traces"),
    ],
)
def test_address_without_a_path_gets_that_of_otlp(given: str, address: str) -> None:
    assert address_of(given) == address


@pytest.mark.parametrize("given", ["h:4318", "http://", "http:///v1/traces", "off"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="no address of an OTLP endpoint"):
        address_of(given)


def test_file_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    run, spans = _all()
    path = tmp_path / "traces.jsonl"
    with FileSink(path) as sink:
        sink.send(run, spans)
        assert not path.exists()
    assert [spans_of(_request(line)) for line in path.read_bytes().splitlines()] == [spans]
    assert [path.name for path in tmp_path.iterdir()] == ["traces.jsonl"]


def test_file_of_an_export_that_failed_is_not_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="planted"), FileSink(tmp_path / "t.jsonl"):
        raise ValueError("planted")
    assert list(tmp_path.iterdir()) == []

"""OTLP endpoint over HTTP that parses requests like a collector."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from dora_pipe.observe.traces.names import Kind
from dora_pipe.observe.traces.span import Link, Span, SpanEvent, Value

KINDS: dict[int, Kind] = {1: "internal", 4: "producer", 5: "consumer"}


class OtlpEndpoint:
    """Example: ``with OtlpEndpoint() as endpoint: ...; endpoint.spans``.

    `refuse` rejects the first requests; `refuses` rejects by number, with Retry-After.
    """

    def __init__(
        self,
        *,
        refuse: int = 0,
        status: int = 503,
        refuses: Callable[[int], tuple[int, str] | None] | None = None,
    ) -> None:
        self.refuses = refuses or (lambda asked: (status, "") if asked <= refuse else None)
        self.rejects = 0
        """Spans of each request to drop."""
        self.requests: list[ExportTraceServiceRequest] = []
        self.asked = 0
        handler = type("Handler", (_Handler,), {"endpoint": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=0.05), daemon=True
        )

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        return [span for request in list(self.requests) for span in spans_of(request)]

    def resources(self) -> list[dict[str, Value]]:
        return [
            {attribute.key: value_of(attribute.value) for attribute in each.resource.attributes}
            for request in self.requests
            for each in request.resource_spans
        ]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    endpoint: OtlpEndpoint

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.endpoint.asked += 1
        if self.path != "/v1/traces" or self.headers["content-type"] != "application/x-protobuf":
            self.send_error(404)
            return
        refused = self.endpoint.refuses(self.endpoint.asked)
        if refused is not None:
            self._refuse(*refused)
            return
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        self.endpoint.requests.append(request)
        partial = ExportTracePartialSuccess(rejected_spans=self.endpoint.rejects)
        partial.error_message = "quota" if self.endpoint.rejects else ""
        answer = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _refuse(self, status: int, retry_after: str) -> None:
        self.send_response(status)
        if retry_after:
            self.send_header("Retry-After", retry_after)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def spans_of(request: ExportTraceServiceRequest) -> list[Span]:
    return [
        _span(span)
        for each in request.resource_spans
        for scope in each.scope_spans
        for span in scope.spans
    ]


def _span(span: trace_pb2.Span) -> Span:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    actual_span = Span(
        stage=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(
            SpanEvent(e.name, e.time_unix_nano, _attributes(e.attributes)) for e in span.events
        ),
        links=tuple(
            Link(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes))
            for link in span.links
        ),
        error=span.status.message if failed else "",
    )
    assert actual_span.kind == KINDS[span.kind], actual_span
    return actual_span


def _attributes(attributes: Any) -> dict[str, Value]:
    return {attribute.key: value_of(attribute.value) for attribute in attributes}


def value_of(value: AnyValue) -> Value:
    which = value.WhichOneof("value")
    if which == "array_value":
        return tuple(str(value_of(value)) for value in value.array_value.values)
    content: Value = getattr(value, str(which))
    return content

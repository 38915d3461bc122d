"""Send spans through the OpenTelemetry SDK, or write them as OTLP JSON lines."""

from __future__ import annotations

import json
import logging
from base64 import b64decode
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol, Self
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.observe.traces import names
from dora_pipe.observe.traces.ids import RunFacts
from dora_pipe.observe.traces.span import Span

SERVICE: Final = "dora-pipe"
SCOPE: Final = "dora_pipe.telemetry"

SPANS_MAX: Final = 512
"""Spans per request or line; about 0.5 MB."""

LINKS_MAX: Final = 8192
"""Links per request or line: a step links every trajectory of its batch."""

TIMEOUT_S: Final = 30.0
"""Timeout of a request, including the exporter's retries."""

TRACES_PATH: Final = "/v1/traces"
_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})


class NotTaken(ResourceError):
    """Only the first `taken` spans were accepted."""

    def __init__(self, message: str, *, hint: str, taken: int) -> None:
        super().__init__(message, hint=hint)
        self.taken = taken


class Sink(Protocol):
    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
        """Raises ResourceError; NotTaken gives the number of sent spans."""
        ...


def is_address(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def address_of(target: str) -> str:
    """Return the endpoint's URL, with OTLP's default path if it has none. Raises UsageError.

    Example: ``address_of("http://127.0.0.1:4318") == "http://127.0.0.1:4318/v1/traces"``.
    """
    parts = urlsplit(target)
    if not is_address(target) or not parts.hostname:
        raise UsageError(
            f"no address of an OTLP endpoint: {target!r}", hint="e.g. http://127.0.0.1:4318"
        )
    return target.rstrip("/") + TRACES_PATH if parts.path in ("", "/") else target


class HttpSink:
    """OTLP endpoint over HTTP with protobuf; OTEL_EXPORTER_OTLP_HEADERS sets headers."""

    def __init__(self, target: str) -> None:
        self.address = address_of(target)
        self.rejected = 0
        """Spans rejected by the endpoint (partial success)."""
        self.reason = ""
        # The import takes 0.5 s.
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        # The caller reports errors in one line.
        logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)
        session = requests.Session()
        session.hooks["response"].append(self._answered)
        self._answer: requests.Response | None = None
        self._exporter = OTLPSpanExporter(endpoint=self.address, timeout=TIMEOUT_S, session=session)

    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
        """Raises NotTaken at the first failed request."""
        taken = 0
        for few in pieces(spans):
            self._answer = None
            if self._exporter.export(sdk_spans(run, few)) is not SpanExportResult.SUCCESS:
                raise self._not_taken(taken)
            taken += len(few)
            self._note_rejected()

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _answered(self, response: Any, *_: Any, **__: Any) -> None:
        self._answer = response

    def _note_rejected(self) -> None:
        """OTLP forbids resending rejected spans."""
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceResponse,
        )

        try:
            body = b"" if self._answer is None else self._answer.content
            partial = ExportTraceServiceResponse.FromString(body).partial_success
        except DecodeError:
            return
        if partial.rejected_spans > 0:
            self.rejected += partial.rejected_spans
            self.reason = partial.error_message

    def _not_taken(self, taken: int) -> NotTaken:
        answer = self._answer
        if answer is None:
            message = f"no answer from {self.address}"
            hint = "is a collector listening there? OTLP over HTTP is port 4318 as a rule"
            return NotTaken(message, hint=hint, taken=taken)
        status = f"{answer.status_code} {answer.reason or ''}".strip()
        if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            hint = "OTEL_EXPORTER_OTLP_HEADERS holds the headers it requires"
        elif answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            hint = "later, the same command continues where this one ended"
        else:
            hint = "is that an OTLP endpoint? an address without a path gets /v1/traces"
        return NotTaken(f"{self.address} does not take traces ({status})", hint=hint, taken=taken)


class FileSink:
    """File of OTLP JSON, one request per line; replaces an earlier file on success."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.tmp")
        self._file = self._unfinished.open("w")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._unfinished.replace(self._path)
        self._unfinished.unlink(missing_ok=True)

    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
        from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]

        for few in pieces(spans):
            request = encode_spans(sdk_spans(run, few))
            plain = MessageToDict(request, use_integers_for_enums=True)
            for resource in plain["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    _make_ids_hex(scope["spans"])
            self._file.write(json.dumps(plain) + "\n")


def sdk_spans(run: RunFacts, spans: Sequence[Span]) -> list[ReadableSpan]:
    resource = Resource(
        {names.SERVICE: SERVICE, names.PACKAGE: run.package, names.RUN: run.key.run}
    )
    scope = InstrumentationScope(SCOPE)
    return [
        ReadableSpan(
            name=span.stage,
            context=_context(span.trace_id, span.span_id),
            parent=_context(span.trace_id, span.parent_id) if span.parent_id else None,
            resource=resource,
            attributes=span.attributes,
            events=[SdkEvent(event.name, event.attributes, event.at_ns) for event in span.events],
            links=[
                SdkLink(_context(link.trace_id, link.span_id, remote=True), link.attributes)
                for link in span.links
            ],
            kind=SpanKind[span.kind.upper()],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )
        for span in spans
    ]


def pieces(spans: Sequence[Span]) -> Iterator[list[Span]]:
    few: list[Span] = []
    links = 0
    for span in spans:
        if few and (len(few) >= SPANS_MAX or links + len(span.links) > LINKS_MAX):
            yield few
            few, links = [], 0
        few.append(span)
        links += len(span.links)
    if few:
        yield few


def _context(trace: str, span: str, *, remote: bool = False) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), remote, TraceFlags(TraceFlags.SAMPLED))


def _make_ids_hex(spans: list[dict[str, Any]]) -> None:
    """OTLP JSON uses hex ids, protobuf JSON base64."""
    for span in spans:
        for own in (span, *span.get("links", ())):
            for key in _IDS & own.keys():
                own[key] = b64decode(own[key]).hex()

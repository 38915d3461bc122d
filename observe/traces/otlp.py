"""Spans in OpenTelemetry's protocol: as lines of JSON, or as the SDK's spans for its exporter.

It decides nothing. A line of a file is one ExportTraceServiceRequest in OTLP's JSON, which is what
a collector's file receiver reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as SdkLink
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from dora_pipe.observe.traces import names
from dora_pipe.observe.traces.ids import RunFacts
from dora_pipe.observe.traces.span import Span, Value

SERVICE: Final = "dora-pipe"
SCOPE: Final = "dora_pipe.telemetry"

_KINDS: Final = {"internal": 1, "producer": 4, "consumer": 5}
_SDK_KINDS: Final = {
    "internal": SpanKind.INTERNAL,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}
_ERROR: Final = 2
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


def resource_of(run: RunFacts) -> dict[str, str]:
    """What holds for all spans of a run."""
    return {names.SERVICE: SERVICE, names.PACKAGE: run.package, names.RUN: run.key.run}


def json_line(run: RunFacts, spans: Sequence[Span]) -> bytes:
    """One request in OTLP's JSON, with its line end."""
    scope = {"scope": {"name": SCOPE}, "spans": [_plain(one) for one in spans]}
    resource = {"attributes": _attributes(resource_of(run))}
    whole = {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}
    return msgspec.json.encode(whole) + b"\n"


def _plain(span: Span) -> dict[str, Any]:
    """Ids in hex, 64-bit integers as text: where OTLP differs from protobuf's own JSON."""
    plain: dict[str, Any] = {"traceId": span.trace_id, "spanId": span.span_id}
    if span.parent_id:
        plain["parentSpanId"] = span.parent_id
    plain |= {
        "name": span.stage,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.events:
        plain["events"] = [
            {
                "timeUnixNano": str(one.at_ns),
                "name": one.name,
                "attributes": _attributes(one.attributes),
            }
            for one in span.events
        ]
    if span.links:
        plain["links"] = [
            {
                "traceId": one.trace_id,
                "spanId": one.span_id,
                "attributes": _attributes(one.attributes),
            }
            for one in span.links
        ]
    if span.error:
        plain["status"] = {"code": _ERROR, "message": span.error}
    return plain


def _attributes(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Value) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case tuple():
            return {"arrayValue": {"values": [_value(one) for one in value]}}


def sdk_spans(run: RunFacts, spans: Sequence[Span]) -> list[ReadableSpan]:
    """The same for an exporter of the SDK."""
    resource, scope = Resource(resource_of(run)), InstrumentationScope(SCOPE)
    return [_sdk(one, resource, scope) for one in spans]


def _sdk(span: Span, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    parent = _context(span.trace_id, span.parent_id) if span.parent_id else None
    status = Status(StatusCode.ERROR, span.error) if span.error else Status()
    return ReadableSpan(
        name=span.stage,
        context=_context(span.trace_id, span.span_id),
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        events=[SdkEvent(one.name, one.attributes, one.at_ns) for one in span.events],
        links=[
            SdkLink(_context(one.trace_id, one.span_id, remote=True), one.attributes)
            for one in span.links
        ],
        kind=_SDK_KINDS[span.kind],
        status=status,
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=scope,
    )


def _context(trace: str, span: str, *, remote: bool = False) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), remote, _SAMPLED)

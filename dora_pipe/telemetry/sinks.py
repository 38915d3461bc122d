"""Where traces go: a file of OTLP's JSON lines, or an endpoint that takes OTLP over HTTP.

It decides how many spans go into one request, and what an address without a path means.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self
from urllib.parse import urlsplit

from opentelemetry.sdk.trace.export import SpanExportResult

from dora_pipe.errors import ResourceError, UsageError
from dora_pipe.telemetry.course import RunFacts
from dora_pipe.telemetry.otlp import json_line, sdk_spans
from dora_pipe.telemetry.span import Span

SPANS_MAX: Final = 512
"""In one request or line; about half a megabyte."""

LINKS_MAX: Final = 8192
"""In one request or line: a step links every trajectory of its batch, some 100 bytes each."""

TIMEOUT_S: Final = 10.0
"""Of one request, all its retries together."""

TRACES_PATH: Final = "/v1/traces"
"""Where OTLP over HTTP takes traces."""


class Sink(Protocol):
    """Takes spans of one run."""

    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
        """Send all. Raises ResourceError when they could not be sent; some may have been."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


def is_address(target: str) -> bool:
    """Whether this is an address, not a file."""
    return target.startswith(("http://", "https://"))


def address_of(target: str) -> str:
    """The address of an endpoint: one without a path gets OTLP's. Raises UsageError.

    Example: ``address_of("http://127.0.0.1:4318") == "http://127.0.0.1:4318/v1/traces"``.
    """
    parts = urlsplit(target)
    if not is_address(target) or not parts.hostname:
        raise UsageError(
            f"no address of an OTLP endpoint: {target!r}", hint="e.g. http://127.0.0.1:4318"
        )
    return target.rstrip("/") + TRACES_PATH if parts.path in ("", "/") else target


class HttpSink:
    """An endpoint that takes OTLP over HTTP as protobuf, such as a collector or Jaeger.

    Headers that it wants (a token, say) are in the environment: OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, target: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.address = address_of(target)
        # It brings an HTTP client with it: half a second that only who sends traces pays.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=self.address, timeout=timeout_s)

    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
        """Send all; what fails is tried again for `timeout_s`. Raises ResourceError."""
        for few in pieces(spans):
            if self._exporter.export(sdk_spans(run, few)) is not SpanExportResult.SUCCESS:
                raise ResourceError(
                    f"{self.address} does not take traces",
                    hint="is a collector listening there? OTLP over HTTP is port 4318 as a rule",
                )

    def close(self) -> None:
        """Let go of the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class FileSink:
    """A file of its own, all or nothing: it has its name when the block ends without an error."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise UsageError(f"{path} is there already", hint="choose another name, or remove it")
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.tmp")
        self._file = self._unfinished.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if kind is None:
            self._unfinished.replace(self._path)
        self._unfinished.unlink(missing_ok=True)

    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
        """Write all."""
        for few in pieces(spans):
            self._file.write(json_line(run, few))

    def close(self) -> None:
        """Let go of the file, which is removed if the block has not ended."""
        self._file.close()


def pieces(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans in requests of a bounded size."""
    few: list[Span] = []
    links = 0
    for one in spans:
        if few and (len(few) >= SPANS_MAX or links + len(one.links) > LINKS_MAX):
            yield few
            few, links = [], 0
        few.append(one)
        links += len(one.links)
    if few:
        yield few

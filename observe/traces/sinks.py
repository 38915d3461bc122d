"""Where traces go: a file of OTLP's JSON lines, or an endpoint that takes OTLP over HTTP.

It decides how many spans go into one request, what an address without a path means, and how long
an endpoint is waited for that takes no more for now. As OTLP has it, 429, 502, 503 and 504 are no
refusals: it is left alone for as long as it asks (Retry-After), else twice as long each time, with
some chance in it, so that several senders do not come back together. Whoever never got a word from
an address does not wait for it: it is more likely a wrong one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol, Self
from urllib.parse import urlsplit

from opentelemetry.sdk.trace.export import SpanExportResult

from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.observe.traces.ids import RunFacts
from dora_pipe.observe.traces.otlp import json_line, sdk_spans
from dora_pipe.observe.traces.span import Span

BUSY_STATUSES: Final = frozenset({429, 502, 503, 504})
"""What an endpoint answers that is there and takes no more for now, as OTLP has it."""

SPANS_MAX: Final = 512
"""In one request or line; about half a megabyte."""

LINKS_MAX: Final = 8192
"""In one request or line: a step links every trajectory of its batch, some 100 bytes each."""

TIMEOUT_S: Final = 10.0
"""Of one request, with what it takes to connect."""

LOG = logging.getLogger(__name__)

TRACES_PATH: Final = "/v1/traces"
"""Where OTLP over HTTP takes traces."""


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """What an endpoint said that did not take a request."""

    status: int
    reason: str
    retry_after: str = ""
    """Seconds or an HTTP date, as it came; see `retry_after_s`."""

    def __str__(self) -> str:
        return f"{self.status} {self.reason}".strip()

    def retry_after_s(self, wall_ns: int) -> float | None:
        """Seconds from now that it asked to be left alone; None where it named no time."""
        try:
            if self.retry_after.isdigit():
                return float(self.retry_after)
            at = parsedate_to_datetime(self.retry_after)
        except ValueError:
            return None
        return max(0.0, at.replace(tzinfo=at.tzinfo or UTC).timestamp() - wall_ns / 1e9)


class NotTaken(ResourceError):
    """An endpoint did not take all spans of a call, only the first `taken`."""

    def __init__(
        self, message: str, *, hint: str, taken: int, answer: EndpointAnswer | None
    ) -> None:
        super().__init__(message, hint=hint)
        self.taken = taken
        self.answer = answer
        """None: there was none, nobody was reached."""

    @property
    def busy(self) -> bool:
        """Whether it would take them later."""
        return self.answer is not None and self.answer.status in BUSY_STATUSES


@dataclass(slots=True)
class Rejected:
    """Spans that an endpoint has taken and dropped, as its answers say (partial success)."""

    spans: int = 0
    why: str = ""
    """Reason in the newest answer."""

    @property
    def words(self) -> str:
        """Text after the number of sent spans; empty if the endpoint rejected none."""
        why = f": {self.why}" if self.why else ""
        return f", {self.spans} rejected by the endpoint{why}" if self.spans else ""


class _Refused(Exception):
    """Ends a request whose answer was heard."""


class Sink(Protocol):
    """Takes spans of one run."""

    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
        """Send all. Raises ResourceError when they could not be sent; NotTaken says how many."""
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
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        session = requests.Session()
        session.hooks["response"].append(self._heard)
        self._answer: EndpointAnswer | None = None
        self.rejected = Rejected()
        """Counted over all requests. OTLP forbids sending them again."""
        self._exporter = OTLPSpanExporter(endpoint=self.address, timeout=timeout_s, session=session)

    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
        """Send all, one request after the other. Raises NotTaken at the first that is refused."""
        taken = 0
        for few in pieces(spans):
            if not self._took(run, few):
                raise self._not_taken(taken)
            taken += len(few)

    def _took(self, run: RunFacts, few: Sequence[Span]) -> bool:
        self._answer = None
        try:
            done = self._exporter.export(sdk_spans(run, few))
        except _Refused:  # older exporters let it through
            return False
        return done is SpanExportResult.SUCCESS

    def _heard(self, response: Any, *_: Any, **__: Any) -> None:
        """An answer that is none of the exporter's business: waiting is for who has the time.

        The exporter would wait too, for ten seconds at most, and not say what it was answered.
        """
        if response.status_code >= HTTPStatus.BAD_REQUEST:
            after = response.headers.get("Retry-After", "").strip()
            self._answer = EndpointAnswer(response.status_code, response.reason or "", after)
            raise _Refused
        self._note_rejected(response.content)

    def _note_rejected(self, body: bytes) -> None:
        """Count what an answer says was rejected; one that is no protobuf says nothing."""
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceResponse,
        )

        try:
            partial = ExportTraceServiceResponse.FromString(body).partial_success
        except DecodeError:
            return
        if partial.rejected_spans > 0:
            if not self.rejected.spans:
                LOG.warning("%s rejects spans: %s", self.address, partial.error_message)
            self.rejected.spans += partial.rejected_spans
            self.rejected.why = partial.error_message

    def _not_taken(self, taken: int) -> NotTaken:
        answer = self._answer
        if answer is None:
            message = f"no answer from {self.address}"
            hint = "is a collector listening there? OTLP over HTTP is port 4318 as a rule"
        elif answer.status in BUSY_STATUSES:
            message = f"{self.address} is busy ({answer})"
            hint = "it takes traces, but no more for now"
        elif answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            message = f"{self.address} lets nobody in ({answer})"
            hint = "what it wants to be shown is in OTEL_EXPORTER_OTLP_HEADERS"
        else:
            message = f"{self.address} does not take traces ({answer})"
            hint = "is that an OTLP endpoint? an address without a path gets /v1/traces"
        return NotTaken(message, hint=hint, taken=taken, answer=answer)

    def close(self) -> None:
        """Let go of the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class FileSink:
    """A file, all or nothing: it has its name, in place of what had, when the block ends well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.tmp")
        self._file = self._unfinished.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._unfinished.replace(self._path)
        self._unfinished.unlink(missing_ok=True)

    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
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


BACKOFF_FIRST_S: Final = 1.0
BACKOFF_MAX_S: Final = 30.0

BUSY_MAX_S: Final = 600.0
"""An endpoint that takes nothing for so long is given up."""


def jittered(pause_s: float, chance: Callable[[], float]) -> float:
    """Between half and one and a half of a pause; `chance` is uniform in [0, 1)."""
    return pause_s * (0.5 + chance())


class RetryingSink:
    """Sends through another sink. `notify` hears of every wait, for people.

    Example: ``RetryingSink(HttpSink(url), clock=SystemClock(), chance=random.random, notify=say)``
    """

    def __init__(
        self,
        sink: Sink,
        *,
        clock: Clock,
        chance: Callable[[], float],
        notify: Callable[[str], None],
    ) -> None:
        self._sink, self._clock, self._chance, self._notify = sink, clock, chance, notify
        self._pause_s = BACKOFF_FIRST_S
        self._since_ns: int | None = None
        self.sent = 0
        """Spans that were taken."""

    def send(self, run: RunFacts, spans: Sequence[Span]) -> None:
        """Send all, whatever it takes. Raises ResourceError when that is too long, or in vain."""
        while True:
            try:
                self._sink.send(run, spans)
            except NotTaken as error:
                self._took(error.taken)
                spans = spans[error.taken :]
                self._wait(error)
            else:
                self._took(len(spans))
                return

    def close(self) -> None:
        """Let go of everything."""
        self._sink.close()

    def _took(self, spans: int) -> None:
        self.sent += spans
        if spans:
            self._pause_s, self._since_ns = BACKOFF_FIRST_S, None

    def _wait(self, error: NotTaken) -> None:
        """Wait before another try. Raises the error where none would help, or nobody has time."""
        if not error.busy and (error.answer is not None or not self.sent):
            raise error
        now_ns = self._clock.now_ns()
        self._since_ns = now_ns if self._since_ns is None else self._since_ns
        waited_s = (now_ns - self._since_ns) / 1e9
        asked_s = error.answer.retry_after_s(self._clock.wall_ns()) if error.answer else None
        pause_s = jittered(self._pause_s, self._chance) if asked_s is None else asked_s
        if waited_s + pause_s > BUSY_MAX_S:
            raise ResourceError(
                f"{error.message}: {self.sent} spans were sent, then none for {waited_s:.0f} s",
                hint="later, the same command goes on where this one ended",
            ) from error
        self._notify(f"{error.message}; {self.sent} spans sent, the next try in {pause_s:.1f} s")
        self._pause_s = min(2 * self._pause_s, BACKOFF_MAX_S)
        self._clock.sleep(pause_s)

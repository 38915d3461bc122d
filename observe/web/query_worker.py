"""Answer queries about one run in the thread that owns its log, without locks.

The tables of a finished run are cached next to it. During the first read, queries are answered from
the data so far; later, new records are read first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

from dora_pipe.core.errors import UsageError
from dora_pipe.core.loop.run_lifecycle import run_is_over
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.ledger.database import fresh_catalogue
from dora_pipe.ledger.reading import LivingCatalogue, log_source, save_finished
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.observe.web import pages, tables
from dora_pipe.observe.web.health import health
from dora_pipe.observe.web.overview import overview, run_of
from dora_pipe.observe.web.samples import mismatch, texts
from dora_pipe.observe.web.timeline import timeline
from dora_pipe.observe.web.view import Query, RunSource, RunView, view_of

ANSWER_S: Final = 60.0

LOOK_S: Final = 0.25
"""Minimum interval between checks for new records."""

PIECES_MAX: Final = 4
"""Pieces to read before a query is answered from a grown log."""

Opener = Callable[[], AbstractContextManager[RunSource]]


class _Tables:
    """Tables of a run, cached or read from the log; cached when the run has ended."""

    def __init__(self, source: RunSource, stack: ExitStack) -> None:
        self._source = source
        self._end = saved = None
        if source.catalogue is not None:
            self._end = log_source(source.bus, source.topics)
        if source.catalogue is not None and self._end is not None:
            saved = fresh_catalogue(source.catalogue, self._end)
        self.stats: RunStats | None = None
        self._living = None
        self._view: RunView | None = None
        if saved is not None:
            stack.callback(saved.close)
            self._view = view_of(saved, source.topics.run)
        else:
            bus, topics = source.bus, source.topics
            end = bus.end(TopicPartition(topics.decisions, 0))
            if run_is_over(bus, topics, end, SystemClock()):
                self._living = LivingCatalogue(bus, topics)
            else:
                self.stats = stats = RunStats(topics.run)
                self._living = LivingCatalogue(bus, topics, stats, statuses=stats.status)
            stack.callback(self._living.catalogue.close)
            stack.callback(self._living.close)

    def advance(self) -> bool:
        """Read one piece; return whether there is more. Raises BusError, LogTruncated."""
        if self._living is None:
            return False
        before = self._living.follower.places
        more = self._living.advance()
        if self._living.follower.places != before:
            self._view = None
        elif not more:
            self._keep(self._living)
        return more

    def view(self) -> RunView:
        if self._view is None:
            assert self._living is not None
            self._living.refresh()
            follower = self._living.follower
            self._view = view_of(
                self._living.catalogue,
                self._source.topics.run,
                read=follower.share,
                revision=sum(follower.places),
            )
        return self._view

    def _keep(self, living: LivingCatalogue) -> None:
        if self._source.catalogue is not None and self._end is not None and living.follower.over:
            self.view()
            save_finished(living, self._source.catalogue, self._end)
        self._end = None


class QueryWorker:
    """Query worker of one run; close it."""

    def __init__(self, opener: Opener) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ui-query")
        self._stack = ExitStack()
        self._opener = opener
        self._closing = False
        self._whole = False
        self._looked_s = 0.0
        self._failed: BaseException | None = None
        self._answers: dict[str, tuple[Any, Any]] = {}
        opening = self._thread.submit(self._open)
        if opening.exception(ANSWER_S) is not None:
            self._thread.shutdown()
        opening.result()

    def ask(self, asked: Query) -> dict[str, Any]:
        """Return the answer; the path excludes the run. Raises UsageError, errors of the log."""
        answer: dict[str, Any] = self._run(lambda: self._answer(asked))
        return answer

    def start(self) -> None:
        if not self._closing:
            self._thread.submit(self._tables.advance).add_done_callback(self._read_on)

    def close(self) -> None:
        self._closing = True
        self._run(self._stack.close)
        self._thread.shutdown()

    def _run(self, job: Callable[[], Any]) -> Any:
        future: Future[Any] = self._thread.submit(job)
        return future.result(ANSWER_S)

    def _open(self) -> None:
        self._source = self._stack.enter_context(self._opener())
        self._tables = _Tables(self._source, self._stack)

    def _read_on(self, piece: Future[bool]) -> None:
        self._failed = piece.exception()
        if self._failed is None and piece.result():
            self.start()
        else:
            self._whole = True

    def _answer(self, asked: Query) -> dict[str, Any]:
        if self._failed is not None:
            raise self._failed
        if self._whole:
            self._read_news()
        view = self._tables.view()
        name = asked.path[0] if asked.path else ""
        if name in ONE and len(asked.path) == 2:
            return ONE[name](view, self._source, asked)
        if name in LISTS and len(asked.path) == 1:
            return LISTS[name](view, asked)
        if len(asked.path) != 1 or name not in WHOLE:
            raise UsageError(f"no page {'/'.join(asked.path)!r}")
        return self._whole_run(view, name, asked)

    def _read_news(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        for _ in range(PIECES_MAX):
            if not self._tables.advance():
                break
        self._looked_s = time.monotonic()

    def _whole_run(self, view: RunView, name: str, asked: Query) -> dict[str, Any]:
        match name:
            case "run":
                return run_of(view)
            case "timeline":
                window = timeline(view, asked.number("from"), asked.number("until"))
                return {"timeline": window}
            case "overview":
                return self._kept(name, view.revision, lambda: overview(view))
            case "health":
                return health(view, self._tables.stats, reading=not self._whole)
            case "texts":
                return texts(view, self._source, asked)
            case _:
                return self._kept(name, view.version, lambda: mismatch(view, self._source))

    def _kept(self, name: str, revision: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        cached = self._answers.get(name)
        if cached is None or cached[0] != revision:
            cached = self._answers[name] = revision, make()
        answer: dict[str, Any] = cached[1]
        return answer


ONE: Final = {
    "step": pages.step_page,
    "group": pages.group_page,
    "version": pages.version_page,
    "trajectory": pages.trajectory_page,
}

LISTS: Final = {
    "steps": tables.steps,
    "groups": tables.groups,
    "trajectories": tables.trajectories,
    "decisions": tables.decisions,
}

WHOLE: Final = frozenset({"run", "overview", "timeline", "mismatch", "health", "texts"})

"""Answers what pages ask of one run, in one thread that owns its log; it decides when to read on.

A log is opened, read and asked in that thread alone, so nothing here is locked. While the log is
read for the first time, questions are answered between two pieces of it, with what is known so far;
later a question first looks whether the log has grown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

from dora_pipe.errors import UsageError
from dora_pipe.ui import pages, tables
from dora_pipe.ui.asking import Question
from dora_pipe.ui.book import Book
from dora_pipe.ui.feed import Feed
from dora_pipe.ui.mismatch import mismatch
from dora_pipe.ui.overview import overview, run_of
from dora_pipe.ui.pages import Source
from dora_pipe.ui.replayed import ReplayLine, replay_page
from dora_pipe.ui.sampled import sampled_times
from dora_pipe.ui.timeline import timeline

ANSWER_S: Final = 60.0
"""Of one question."""

LOOK_S: Final = 0.25
"""A log is looked at for news at most so often."""

PIECES_MAX: Final = 4
"""Of a log that has grown, before a question about it is answered with what is known."""

Opener = Callable[[], AbstractContextManager[Source]]


class Desk:
    """One run. Example: ``desk.ask(question("/overview"))``; close it."""

    def __init__(self, opener: Opener, replayed: list[ReplayLine] | None = None) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ui-desk")
        self._stack = ExitStack()
        self._opener = opener
        self._replayed = replayed
        self._closing = False
        self._whole = False
        self._looked_s = 0.0
        self._failed: BaseException | None = None
        self._answers: dict[str, tuple[int, Any]] = {}
        opening = self._thread.submit(self._open)
        if opening.exception(ANSWER_S) is not None:
            self._thread.shutdown()
        opening.result()

    def ask(self, asked: Question) -> dict[str, Any]:
        """The answer to a question, path without the run. Raises UsageError, the log's errors."""
        found: dict[str, Any] = self._run(lambda: self._answer(asked))
        return found

    def read_all(self, told: Callable[[float], None] = lambda share: None) -> None:
        """Wait until the log was read up to its present end. Raises the log's errors."""
        self._later()
        while not self._run(lambda: self._whole):
            told(self._run(lambda: self._feed.read))
        if self._failed is not None:
            raise self._failed

    def start(self) -> None:
        """Read the log from its beginning while questions are answered."""
        self._later()

    def close(self) -> None:
        """Stop reading and let go of the log."""
        self._closing = True
        self._run(self._stack.close)
        self._thread.shutdown()

    def work(self, job: Callable[[Book, Source], Any]) -> Any:
        """Do something with the book in the thread that owns it."""
        return self._run(lambda: job(self._book, self._source))

    def _run(self, job: Callable[[], Any]) -> Any:
        found: Future[Any] = self._thread.submit(job)
        return found.result(ANSWER_S)

    def _open(self) -> None:
        self._source = self._stack.enter_context(self._opener())
        self._book = Book(self._source.topics.run)
        self._feed = Feed(self._source.bus, self._source.topics, self._book)
        self._stack.callback(self._feed.close)

    def _later(self) -> None:
        if not self._closing:
            self._thread.submit(self._feed.advance).add_done_callback(self._read_on)

    def _read_on(self, piece: Future[bool]) -> None:
        """Another piece; questions that came meanwhile are answered before it."""
        self._failed = piece.exception()
        if self._failed is None and piece.result():
            self._later()
        else:
            self._whole = True

    def _answer(self, asked: Question) -> dict[str, Any]:
        if self._failed is not None:
            raise self._failed
        if self._whole:
            self._read_news()
        name = asked.path[0] if asked.path else ""
        if name in ONE and len(asked.path) == 2:
            return ONE[name](self._book, self._source, asked)
        if name in LISTS and len(asked.path) == 1:
            return LISTS[name](self._book, asked)
        if len(asked.path) != 1 or name not in WHOLE:
            raise UsageError(f"no page {'/'.join(asked.path)!r}")
        return self._whole_run(name, asked)

    def _read_news(self) -> None:
        """Look whether the log has grown, if nobody has looked just now."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        for _ in range(PIECES_MAX):
            if not self._feed.advance():
                break
        self._looked_s = time.monotonic()

    def _whole_run(self, name: str, asked: Question) -> dict[str, Any]:
        match name:
            case "run":
                return run_of(self._book, self._feed.read) | {"replay": self._replayed is not None}
            case "timeline":
                window = timeline(self._book, asked.number("from"), asked.number("until"))
                return {"timeline": window}
            case "replay":
                return replay_page(self._replayed or [])
            case "overview":
                return self._kept(name, lambda: overview(self._book, read=self._feed.read))
            case "mismatch":
                return self._kept(name, lambda: mismatch(self._book, self._source), self._steps())
            case _:
                job = lambda: sampled_times(self._book, self._source)  # noqa: E731
                return self._kept(name, job, self._steps())

    def _steps(self) -> int:
        return len(self._book.steps)

    def _kept(
        self, name: str, make: Callable[[], dict[str, Any]], revision: int | None = None
    ) -> dict[str, Any]:
        """An answer that costs something: made again only when there is something new."""
        now = self._book.revision if revision is None else revision
        known = self._answers.get(name)
        if known is None or known[0] != now:
            known = self._answers[name] = now, make()
        found: dict[str, Any] = known[1]
        return found


ONE: Final = {
    "step": pages.step_page,
    "group": pages.group_page,
    "version": pages.version_page,
    "trajectory": pages.trajectory_page,
}
"""Pages of one thing, by the word in their address."""

LISTS: Final = {
    "steps": tables.steps,
    "groups": tables.groups,
    "trajectories": tables.trajectories,
    "decisions": tables.decisions,
}

WHOLE: Final = frozenset({"run", "overview", "timeline", "mismatch", "times", "replay"})
"""Figures of a whole run."""

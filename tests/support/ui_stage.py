"""A book for tests of the pages, told fact by fact; and the recorded run's log as pages see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from dora_pipe.policies.store import PolicyStore
from dora_pipe.schemas.control import (
    AnyControl,
    TakenGroup,
    TakenTrajectory,
)
from dora_pipe.schemas.identity import Purpose, trajectory_id
from dora_pipe.schemas.rounds import (
    End,
    Fate,
    GroupSpec,
    Round,
    TakeBatch,
)
from dora_pipe.ui.book import Book
from dora_pipe.ui.feed import Feed
from dora_pipe.ui.pages import Decode, Source
from tests.support import orchestrator_records as records
from tests.support.recorded_run import RecordedRun
from tests.support.told_run import SECOND_NS, SIBLINGS, ToldRun


class Stage(ToldRun):
    """A run that is told by hand, a second after the other. Example: ``Stage().group(0)``."""

    def __init__(self) -> None:
        self.book = Book(records.RUN)
        super().__init__()

    def take_fact(self, offset: int, fact: AnyControl) -> None:
        """See the base."""
        self.book.take_fact(offset, fact)

    def take_round(self, round_: Round) -> None:
        """See the base."""
        self.book.take_round(round_)

    def worker(self, name: str = "w0", slots: int = 4) -> int:
        """A worker joins; its role epoch."""
        return self.fact(records.joined(name, slots=slots))

    def group(self, ordinal: int, version: int = 0, purpose: Purpose = "train") -> GroupSpec:
        """A group is dispatched."""
        spec = self.spec(ordinal, version, purpose)
        self.decide(self.dispatch(spec))
        return spec

    def place(self, spec: GroupSpec, worker: str, epoch: int, attempt: int = 1) -> None:
        """All siblings go to a worker."""
        self.decide(self.placed(spec, worker, epoch, attempt))

    def log(
        self,
        spec: GroupSpec,
        epoch: int,
        *,
        attempt: int = 1,
        rewards: tuple[float | None, ...] = (1.0, 0.0),
        tokens: int = 20,
        offset: int = 0,
    ) -> None:
        """A worker says that all siblings lie in the log, a second later."""
        self.logged(spec, epoch, rewards, attempt=attempt, tokens=tokens, offset=offset)

    def taken(self, spec: GroupSpec, offset: int = 0) -> TakenGroup:
        """A group as a batch names it."""
        return TakenGroup(
            group=spec.group,
            version=spec.version,
            deadline=spec.deadline,
            trajectories=tuple(
                TakenTrajectory(
                    trajectory=trajectory_id(spec.group, sibling),
                    attempt=1,
                    epoch=0,
                    partition=0,
                    offset=offset + sibling,
                    sha256="s",
                )
                for sibling in range(SIBLINGS)
            ),
        )

    def train(self, step: int, *specs: GroupSpec) -> None:
        """A batch is taken and its step committed, a second apart."""
        groups = tuple(self.taken(one) for one in specs)
        self.decide(
            TakeBatch(reason="all finished", step=step, attempt=1, groups=groups, settings={})
        )
        self.now_ns += SECOND_NS
        self.fact(records.committed(step, groups))

    def end(self, spec: GroupSpec, fate: Fate, why: str = "because") -> None:
        """A group ends otherwise."""
        self.decide(End(reason=why, group=spec.group, fate=fate))


@contextmanager
def source_of(
    recorded: RecordedRun, *, redact: bool = False, decode: Decode | None = None
) -> Iterator[Source]:
    """The recorded run as pages see it."""
    with closing(recorded.open()) as bus:
        yield Source(
            bus=bus,
            topics=recorded.topics,
            policies=PolicyStore(recorded.store),
            decode=decode,
            redact=redact,
        )


def book_of(source: Source) -> Book:
    """A book with everything that a log has."""
    book = Book(source.topics.run)
    with closing(Feed(source.bus, source.topics, book)) as feed:
        while feed.advance():
            pass
        assert feed.unreadable == 0
        assert feed.read == 1.0
    return book

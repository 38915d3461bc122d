"""What became of the episodes of a run that somebody was killed in, from its log and from what its
agents wrote down of the answers that they had.

An agent that is started again makes the same calls, as its are a function of what it is answered.
So each answer to a call (the same prompt, for the same time) that it had before must come again
with the very tokens: from the log, or sampled once more where the worker died before it had said
how far the session was. The trajectory is what the last start was answered, and nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.producers.sessions.addresses import session_name
from dora_pipe.producers.worker.request import key_of
from dora_pipe.schemas.contexts import contexts_of, place_of
from dora_pipe.schemas.control import INFRASTRUCTURE
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory, TurnProgress
from dora_pipe.schemas.trajectory_codec import decode_any_progress, decode_trajectory

Tokens = tuple[int, ...]
CallName = tuple[str, Tokens, int]
"""Trajectory, prompt, and how many calls had it before."""


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run's episodes. `clean` is whether nothing is wrong."""

    episodes: int
    """Trajectories in the log."""
    lost: int
    """Of these, such as are invalid for something that died."""
    starts: int
    """Of agents."""
    calls: int
    """Answers that agents had, in all their starts."""
    again: int
    """Of these, such as an earlier start had too."""
    sampled_again: int
    """Calls whose tokens were sampled and recorded more than once: what a worker recorded last,
    and had not said before it died."""
    other_tokens: int
    """Answers that came again with other tokens."""
    untold: int
    """Calls of trajectories that their last start was not answered so."""

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, and nothing changed."""
        return self.lost == self.other_tokens == self.untold == 0 < self.calls


class Told(msgspec.Struct, frozen=True, array_like=True):
    """A line that an agent wrote."""

    session: str
    start: str
    prompt: Tokens
    tokens: Tokens


def heard_again(bus: Bus, topics: Topics, told: Path) -> Heard:
    """Read all of it. Raises BusError, SchemaError."""
    found = [
        decode_trajectory(record.value)
        for record in records_of(bus, ends_of(bus, topics.trajectories))
    ]
    answers = list(read_told(told))
    heard = calls_by_start(answers)
    first: dict[CallName, Tokens] = {}
    again = other = 0
    for calls in heard.values():
        for name, tokens in calls.items():
            again += name in first
            other += first.setdefault(name, tokens) != tokens
    last = {".".join(one.session.split(".")[:2]): one.start for one in answers}
    return Heard(
        episodes=len(found),
        lost=sum(_is_lost(one) for one in found),
        starts=len(heard),
        calls=len(answers),
        again=again,
        sampled_again=sum(count - 1 for count in _recorded(bus, topics).values()),
        other_tokens=other,
        untold=sum(_untold(one, heard, last) for one in found),
    )


def read_told(path: Path) -> Iterator[Told]:
    """The lines, in the order of their writing; a last one that was cut off is left out."""
    if path.exists():
        *lines, _ = path.read_bytes().split(b"\n")
        yield from (msgspec.json.decode(line, type=Told) for line in lines)


def calls_by_start(answers: Iterable[Told]) -> dict[str, dict[CallName, Tokens]]:
    """What each start of an agent was answered, by call, in the order of the starts."""
    found: dict[str, dict[CallName, Tokens]] = defaultdict(dict)
    counted: Counter[tuple[str, Tokens]] = Counter()
    for one in answers:
        trajectory = one.session.partition(".")[0]
        occurrence = counted[one.start, one.prompt]
        counted[one.start, one.prompt] += 1
        found[one.start][trajectory, one.prompt, occurrence] = one.tokens
    return dict(found)


def _is_lost(found: Trajectory) -> bool:
    """Whether it has no reward for something that died, and not for what its task did."""
    error = found.meta.reward_error or ""
    return found.reward is None and error.partition(":")[0] in INFRASTRUCTURE


def _untold(
    found: Trajectory, heard: dict[str, dict[CallName, Tokens]], last: dict[str, str]
) -> int:
    """Calls of a trajectory that are not what its agent's last start was answered."""
    if not found.meta.calls:
        return 0
    start = last.get(session_name(key_of(found.trajectory, found.meta.attempt)), "")
    told = Counter((prompt, tokens) for (_, prompt, _), tokens in heard.get(start, {}).items())
    logged = Counter(_calls_of(found))
    return (logged - told).total() + (told - logged).total()


def _calls_of(found: Trajectory) -> Iterator[tuple[Tokens, Tokens]]:
    """Prompt and sampled tokens of each call."""
    contexts = list(contexts_of(found))
    for call in found.meta.calls:
        number, length = place_of(call, found.meta.contexts)
        prompt = tuple(contexts[number].token_ids[:length].tolist())
        yield prompt, tuple(found.token_ids[call.start : call.end])


def _recorded(bus: Bus, topics: Topics) -> Counter[tuple[str, int]]:
    """How often each call's tokens were recorded, by trajectory and the call's seed."""
    found: Counter[tuple[str, int]] = Counter()
    ends: dict[TopicPartition, int] = ends_of(bus, topics.progress)
    for record in records_of(bus, ends):
        progress = decode_any_progress(record.value)
        if isinstance(progress, TurnProgress):
            found[progress.trajectory, progress.call.seed] += 1
    return found

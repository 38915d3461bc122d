"""Answers why a run does not move, at present or at a moment of the past; it decides nothing.

What is printed is made here too: a tree of sentences, each indented under the one it explains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.port import Bus
from dora_pipe.core.errors import UsageError
from dora_pipe.observe.text import duration
from dora_pipe.observe.why.advice import ADVICE
from dora_pipe.observe.why.chain import Node, roles_of
from dora_pipe.observe.why.fallbacks import FallbackTaken
from dora_pipe.observe.why.log import Picture, look, look_back, look_before
from dora_pipe.observe.why.parts import NextPart, next_part
from dora_pipe.orchestrator.failures import ended, summary
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.topics import Topics

INDENT: Final = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyAnswer:
    """What every role does or waits for at one moment."""

    run: str
    at_ns: int
    """The moment, wall clock."""
    run_s: float | None
    """The moment, from the start of the run."""
    step: int | None
    """The next to be taken; None before the start."""
    training: int | None
    """The step whose batch is taken and not committed."""
    steps: int | None
    over: bool
    heard_s: float | None
    """How long before the moment any role was heard last; None: never."""
    halted: str
    """Why the run was stopped; empty while it goes on."""
    failing: str
    """How many of the last groups failed and with what; empty when none did."""
    failed: str
    """Share of the newest trajectories that failed, with the error; empty while few did."""
    no_step: str
    """How many groups have ended since the last step; empty while they are few, or a step goes on.
    """
    alarms: tuple[str, ...]
    roles: tuple[Node, ...]
    fallbacks: tuple[FallbackTaken, ...] = ()
    """Files of versions that were lost or damaged on their way to a worker, until then."""
    part: NextPart | None = None
    """What the trainer waits for, where the next batch is taken in parts and no step trains."""

    def rows(self) -> Iterator[tuple[str, float | None, str, str, str]]:
        """(role, since s, what it does or waits for, what that ends at, what to do)."""
        for role in self.roles:
            since = "" if role.since_s is None else f", since {duration(role.since_s)}"
            text = role.text.removeprefix(f"{role.id}: ").removesuffix(since)
            end = "" if role.end is role else role.end.text
            # The roles of a run that was stopped have ended in order.
            ended = self.halted and role.wait == "silent"
            yield role.id, role.since_s, text, end, "" if ended else ADVICE.get(role.wait, "")

    @property
    def stopped(self) -> str:
        """What stands above everything else: that groups fail, or that the run was stopped."""
        if self.halted:
            return f"STOPPED: {self.halted}; mend that, then go on with `run --resume`"
        return f"failing: {self.failing}" if self.failing else ""

    def tree(self) -> Iterator[str]:
        """Every role, and under it why it waits."""
        said: set[str] = set()
        for role in self.roles:
            yield from _lines(role, "", said)

    @property
    def head(self) -> str:
        """How far the run is, and when this was."""
        if self.step is None:
            return f"{self.run}: has not started"
        if self.over:
            return f"{self.run}: is over, {self.steps} steps"
        when = "" if self.run_s is None else f", {duration(self.run_s)} after its start"
        if self.training is not None:
            return f"{self.run}: step {self.training} of {self.steps} is being trained{when}"
        return f"{self.run}: step {self.step} of {self.steps} is next{when}"


def why_now(bus: Bus, topics: Topics, *, now_ns: int) -> WhyAnswer:
    """What the run waits for at present; `now_ns` is the wall clock. Raises what `look` raises."""
    return _answer(look(bus, topics, now_ns=now_ns), topics)


def why_at(bus: Bus, topics: Topics, *, at_ns: int) -> WhyAnswer:
    """What the run waited for at a moment of the past. Raises what `look` raises."""
    return _answer(look_back(bus, topics, at_ns=at_ns), topics)


def why_step(bus: Bus, topics: Topics, *, step: int) -> WhyAnswer:
    """What the run waited for last, before the batch of a step was taken.

    Raises UsageError for a step that was not taken yet, and what `look` raises.
    """
    picture = look_before(bus, topics, step=step)
    if picture is None:
        raise UsageError(
            f"the batch of step {step} has not been taken", hint="see `why` without it"
        )
    return _answer(picture, topics)


def _answer(picture: Picture, topics: Topics) -> WhyAnswer:
    state = picture.state
    known = state.config is not None and state.facts is not None
    roles = tuple(roles_of(picture))
    heard = [one.status.at_ns for one in picture.heard.values()]
    return WhyAnswer(
        run=topics.run,
        at_ns=picture.at_ns,
        run_s=(picture.at_ns - picture.started_ns) / 1e9 if picture.started_ns else None,
        step=state.standing().step if known else None,
        training=state.training.step if state.training else None,
        steps=state.steps if known else None,
        over=state.done,
        heard_s=(picture.at_ns - max(heard)) / 1e9 if heard else None,
        halted=state.failures.halted,
        failing=_failing(state),
        failed=picture.failed.share().words,
        no_step=_no_step(picture),
        # The roles of a run that was stopped have ended in order.
        alarms=()
        if state.failures.halted
        else tuple(alarm for role in roles for alarm in _alarms(role, role)),
        roles=roles,
        fallbacks=tuple(picture.fallbacks),
        part=next_part(state),
    )


def _failing(state: State) -> str:
    if state.config is None:
        return ""
    return summary(state.failures, state.config.groups, at=ended(state.counters.fates))


def _no_step(picture: Picture) -> str:
    state = picture.state
    if state.config is None or state.done or state.failures.halted or state.training is not None:
        return ""
    return picture.since_step.words(state.config.groups.per_step)


def _alarms(role: Node, node: Node) -> Iterator[str]:
    """Alarms of a role itself; those of others are said where they stand by themselves."""
    if node.alarm:
        yield node.text if node is role else f"{role.id}: {node.text}"
    for one in node.because:
        if one.kind == "wait":
            yield from _alarms(role, one)


def _lines(node: Node, indent: str, said: set[str]) -> Iterator[str]:
    """What explains a role, a group or a request is said once; then it is only named."""
    yield indent + node.text
    if node.kind in ("role", "worker", "group", "trajectory"):
        if node.id in said:
            return
        said.add(node.id)
    for one in node.because:
        if node.kind != "trajectory" or one.id not in said:
            yield from _lines(one, indent + INDENT, said)

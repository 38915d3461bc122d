"""Adds up what a run's slots were used for, and why they were empty; it decides nothing.

All of it follows from the fold: between two rounds the state stands still, so each of them has the
time until the next.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.port import Bus
from dora_pipe.catalogue.marks import Stop, stopped_ns
from dora_pipe.observe.text import duration
from dora_pipe.orchestrator.recovery import fold_log
from dora_pipe.orchestrator.slot_use import Use, slot_use
from dora_pipe.schemas.topics import Topics

STEPS_MAX: Final = 4
"""Steps, those whose slots were empty for longest."""

WORDS: Final[Mapping[Use, str]] = {
    "busy": "in use",
    "in-flight": "no group is admitted: staleness.in_flight_batches are in flight",
    "bound": "no group is admitted: one more could not be in time (staleness.max_staleness)",
    "steps": "no group is admitted: no step is left for it",
    "older": "the worker still has requests of an older version",
    "elastic": "the worker sleeps while a step is computed",
    "loading": "the worker loads weights",
    "kv": "the worker's KV cache is full",
    "leaving": "the worker leaves, or is not heard",
    "placing": "requests wait for a worker of their version",
    "pause": "the run is paused, or was halted",
}

ADVICE: Final[Mapping[Use, str]] = {
    "in-flight": 'while the trainer waits too: staleness.in_flight_batches = "auto"',
    "bound": "a faster trainer, fewer workers, or staleness.max_staleness",
    "older": "more workers of fewer slots each: one that runs empty is less of all",
    "elastic": "fewer of them: workers.elastic",
    "loading": "transfers.kind; more workers of fewer slots each",
    "kv": "fewer slots, or a larger cache",
}
"""What to do about it, where something can be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSpan:
    """Slots of a run, or of one step: from the commit before it to its own."""

    step: int | None
    """None: of the whole run."""
    seconds: float
    training: Mapping[Use, float]
    """Slot seconds while a step trained."""
    waiting: Mapping[Use, float]
    """Slot seconds while none did."""

    def share(self, use: Use) -> float:
        """Of all slot seconds, those with this use."""
        return self._ratio(self.training.get(use, 0.0) + self.waiting.get(use, 0.0))

    def waiting_share(self, use: Use) -> float:
        """Of all slot seconds, those with this use while no step trained."""
        return self._ratio(self.waiting.get(use, 0.0))

    @property
    def uses(self) -> list[Use]:
        """What there was, the largest share first; `busy` before all."""
        found: list[Use] = [one for one in WORDS if self.share(one) > 0]
        return sorted(found, key=lambda one: (one != "busy", -self.share(one)))

    def rows(self) -> Iterator[tuple[str, float, float, str]]:
        """(what for or why empty, share, share while no step trained, what to do)."""
        for use in self.uses:
            yield WORDS[use], self.share(use), self.waiting_share(use), ADVICE.get(use, "")

    def _ratio(self, slot_s: float) -> float:
        whole = sum(self.training.values()) + sum(self.waiting.values())
        return slot_s / whole if whole else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """What the slots of a run were used for."""

    run: str
    whole: SlotSpan
    steps: tuple[SlotSpan, ...]

    @property
    def head(self) -> str:
        busy, lasted = self.whole.share("busy"), duration(self.whole.seconds)
        return f"{self.run}: {busy:.0%} of all slots were in use, over {lasted}"

    @property
    def emptiest(self) -> list[SlotSpan]:
        """The steps with the most empty slot seconds, but the first, before which all is empty."""
        later = [one for one in self.steps if one.step and one.share("busy") < 1]
        return sorted(later, key=lambda one: -(1 - one.share("busy")) * one.seconds)[:STEPS_MAX]


def slots_of(bus: Bus, topics: Topics, stops: Sequence[Stop] = ()) -> Slots:
    """Every round's use, for as long as it stood; while the run was stopped it had no slots.

    Raises what `fold_log` raises.
    """
    uses: dict[tuple[int, bool], Counter[Use]] = defaultdict(Counter)
    lasted_ns: Counter[int] = Counter()
    before_ns, standing = 0, Counter[Use]()
    key = (0, False)
    for folded in fold_log(bus, topics):
        state, now_ns = folded.state, folded.at.round.now_ns
        if standing:
            stood_ns = max(0, now_ns - before_ns - stopped_ns(stops, before_ns, now_ns))
            lasted_ns[key[0]] += stood_ns
            for use, count in standing.items():
                uses[key][use] += count * stood_ns
        before_ns, standing = now_ns, slot_use(state)
        key = (state.version, state.training is not None)
    whole_ns = sum(lasted_ns.values())
    return Slots(
        run=topics.run,
        whole=SlotSpan(
            step=None,
            seconds=whole_ns / 1e9,
            training=_seconds(one for (_, trains), one in uses.items() if trains),
            waiting=_seconds(one for (_, trains), one in uses.items() if not trains),
        ),
        steps=tuple(
            SlotSpan(
                step=step,
                seconds=lasted_ns[step] / 1e9,
                training=_seconds([uses[step, True]]),
                waiting=_seconds([uses[step, False]]),
            )
            for step in sorted(lasted_ns)
        ),
    )


def _seconds(counted: Iterable[Counter[Use]]) -> dict[Use, float]:
    total: Counter[Use] = Counter()
    for one in counted:
        total.update(one)
    return {use: slot_ns / 1e9 for use, slot_ns in total.items()}

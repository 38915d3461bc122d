"""Rules for dispatching and taking groups; see that section of reference/records.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from log import Json

MATTER = {"run.steps", "staleness.in_flight_batches", "staleness.max_staleness"}
"""Keys that a `set` may change and that affect admission."""


def feasible(deadlines: Iterable[int], step: int, per_step: int) -> bool:
    """Report whether groups with these deadlines can all be taken in time from `step` on."""
    turns = enumerate(sorted(deadlines))
    return all(step + place // per_step <= deadline for place, deadline in turns)


class Bound:
    """U, the training groups that are neither taken nor ended, and the batch in training.

    This class does not know which commands the orchestrator accepted. After the first relevant
    command, admission is not checked, and a deadline may follow any requested bound.
    """

    def __init__(self) -> None:
        self.training: tuple[int, int] | None = None  # step, attempt
        self._config: Json = {}
        self._u: dict[str, Json] = {}
        self._finished: dict[str, Json] = {}
        self._in_flight = 2.0  # batches, if automatic
        self._parts: list[list[str]] = []  # of the next step, each a list of groups of U
        self._given_up: list[list[str]] = []  # the parts before a `set`, in case it was accepted
        self._staleness: set[int] = set()
        self.commanded = False

    def start(self, config: Json) -> None:
        """Start with this configuration."""
        self._config = config
        self._staleness = {config["staleness"]["max_staleness"]}

    @property
    def _per_step(self) -> int:
        return int(self._config["groups"]["per_step"])

    def dispatch(self, spec: Json, committed: int) -> Iterator[str]:
        """Add a training group to U and yield what is wrong with it."""
        if spec["deadline"] - spec["version"] not in self._staleness:
            yield f"has the deadline {spec['deadline']}"
        if not self.commanded:
            yield from self._inadmissible(spec, committed)
        self._u[spec["group"]] = spec

    def _inadmissible(self, spec: Json, committed: int) -> Iterator[str]:
        staleness, trains = self._config["staleness"], self.training is not None
        batches = staleness["in_flight_batches"]
        if batches in (None, "auto"):
            batches = min(self._in_flight, staleness["max_staleness"] + 1)
        limit = max(self._per_step, math.ceil(batches * self._per_step - 1e-9))
        if len(self._u) + self._per_step * trains >= limit:
            yield f"is dispatched although {limit} groups are in flight"
        step = committed + trains
        if len(self._u) >= (self._config["run"]["steps"] - step) * self._per_step:
            yield "is dispatched although no step is left for it"
        deadlines = self._due(committed)
        if not feasible([*deadlines, spec["deadline"]], step, self._per_step):
            yield "is dispatched against the bound"

    def settle(
        self, spec: Json, left: int, rewards: Sequence[float | None], *, waits: bool = False
    ) -> None:
        """Update a group from its open trajectories and rewards: finished, doomed, or neither; one
        that waits for group scores is not finished."""
        rules, name = self._config["groups"], spec["group"]
        if name not in self._u:
            return
        valid = [one for one in rewards if one is not None]
        if len(valid) + left < min(rules["min_valid_siblings"], spec["size"]):
            self.leave(name)
        elif not left and not waits:
            if rules["filter_zero_advantage"] and len(set(valid)) <= 1:
                self.leave(name)
            else:
                self._finished[name] = spec

    def leave(self, name: str) -> None:
        """Remove a taken or ended group."""
        self._u.pop(name, None)
        self._finished.pop(name, None)

    @property
    def _held(self) -> list[str]:
        return [name for part in self._parts for name in part]

    def _due(self, committed: int) -> list[int]:
        """Return the deadlines of U; parts of the next step are due at it."""
        held, step = {*self._held}, committed + (self.training is not None)
        return [step if name in held else one["deadline"] for name, one in self._u.items()]

    def _earliest(self, count: int) -> list[str]:
        held = {*self._held}
        free = [one for name, one in self._finished.items() if name not in held]
        free.sort(key=lambda one: (one["deadline"], one["ordinal"]))
        return [one["group"] for one in free[:count]]

    def _not_next(self, decision: Json, step: int) -> Iterator[str]:
        if decision["step"] != step:
            yield f"is taken although step {step} comes next"

    def _has_parts(self, count: int) -> None:
        """Restore parts: the number in a decision shows whether a `set` was accepted."""
        if count > len(self._parts):
            self._parts = self._given_up
        self._parts, self._given_up = self._parts[:count], []

    def take_part(self, decision: Json, committed: int) -> Iterator[str]:
        """Take a part of the next batch and yield what is wrong with it. An existing number shows
        that a command gave up that part and later ones."""
        step = committed + (self.training is not None)
        yield from self._not_next(decision, step)
        self._has_parts(decision["part"])
        if self.training is not None and self._parts:
            yield f"has a second part while step {self.training[0]} trains"
        taken = [one["group"] for one in decision["groups"]]
        if taken != self._earliest(len(taken)):
            yield "has a part that is not of the earliest deadlines"
        self._parts.append(taken)
        if len(self._held) >= self._per_step:
            yield "has a part that leaves nothing for the batch"
        if not feasible(self._due(committed), step, self._per_step):
            yield "has a part that leaves no room for groups that are due"

    def _counts_otherwise(self, decision: Json) -> Iterator[str]:
        """Check an automatic `async_batches`: changes of at most a quarter, at least 2, at most the
        bound."""
        batches, staleness = decision.get("in_flight"), self._config["staleness"]
        if self.commanded:
            return
        if (batches is not None) != (staleness["in_flight_batches"] == "auto"):
            yield "says how many batches are in flight where that is set, or does not where it must"
        elif batches is not None:
            before, most = self._in_flight, max(2, staleness["max_staleness"] + 1)
            decided = 2 <= batches <= most and abs(batches - min(before, most)) <= 0.25
            if batches != before and not decided:
                yield f"has {batches} batches in flight behind {before}"
            self._in_flight = batches

    def take(self, decision: Json, committed: int) -> Iterator[str]:
        """Take a batch and yield what is wrong with it; its parts are all that remain."""
        yield from self._not_next(decision, committed)
        if self.training is not None:
            yield f"is taken while step {self.training[0]} trains"
        yield from self._counts_otherwise(decision)
        sizes = decision.get("parts", [])
        self._has_parts(len(sizes))
        if sizes != [len(part) for part in self._parts[: len(sizes)]]:
            yield f"names parts of {sizes} groups, which were not taken"
        held = self._held
        due = [*held, *self._earliest(self._per_step - len(held))]
        taken = [one["group"] for one in decision["groups"]]
        if taken != due:
            yield f"is not of the earliest deadlines: {sorted({*taken} ^ {*due})[:4]}"
        self._parts = []
        for name in taken:
            self.leave(name)
        if not feasible(self._due(committed), committed + 1, self._per_step):
            yield "leaves groups behind that cannot be in time"
        self.training = decision["step"], decision["attempt"]

    def give_back(self, specs: Sequence[Json]) -> None:
        """Return the groups of a refused batch, except the offenders."""
        for spec in specs:
            self._u[spec["group"]] = self._finished[spec["group"]] = spec
        self._end_training()

    def _end_training(self) -> None:
        """End the batch in training, and give up the parts of the next step."""
        self.training, self._parts, self._given_up = None, [], []

    def command(self, verb: str, args: dict[str, Any]) -> None:
        """Apply a user's command."""
        trains = self.training
        if verb == "fail-batch" and trains and args.get("step", trains[0]) == trains[0]:
            self._end_training()
        if verb == "set" and self._parts:
            self._parts, self._given_up = [], self._parts
        if verb == "stop" or (verb == "set" and args.keys() & MATTER):
            self.commanded = True
            if "staleness.max_staleness" in args:
                self._staleness.add(args["staleness.max_staleness"])

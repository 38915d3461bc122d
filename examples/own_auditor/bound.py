"""Rules for dispatching and taking groups, see reference/records.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from log import Json

MATTER = {"run.steps", "staleness.async_batches", "staleness.max_staleness"}
"""Keys that affect admission."""


def feasible(deadlines: Iterable[int], step: int, per_step: int) -> bool:
    """Report whether all deadlines can be met from `step` on."""
    turns = enumerate(sorted(deadlines))
    return all(step + index // per_step <= deadline for index, deadline in turns)


class Bound:
    """U, the training groups neither taken nor ended, and the batch in training.

    Accepted commands are unknown here. After a relevant one, admission is not checked and any
    requested bound is allowed.
    """

    def __init__(self) -> None:
        self.training: tuple[int, int] | None = None  # step, attempt
        self._config: Json = {}
        self._u: dict[str, Json] = {}
        self._finished: dict[str, Json] = {}
        self._in_flight = 2.0  # batches, if automatic
        self._parts: list[list[str]] = []  # of the next step, each a list of groups of U
        self._given_up: list[list[str]] = []  # before a `set` that may have been accepted
        self._staleness: set[int] = set()
        self.commanded = False

    def start(self, config: Json) -> None:
        self._config = config
        self._staleness = {config["staleness"]["max_staleness"]}

    @property
    def _per_step(self) -> int:
        return int(self._config["rollout"]["prompts_per_step"])

    def dispatch(self, spec: Json, committed: int) -> Iterator[str]:
        """Add a group to U; yield what is wrong."""
        if spec["deadline"] - spec["version"] not in self._staleness:
            yield f"has the deadline {spec['deadline']}"
        if not self.commanded:
            yield from self._inadmissible(spec, committed)
        self._u[spec["group"]] = spec

    def _inadmissible(self, spec: Json, committed: int) -> Iterator[str]:
        staleness, trains = self._config["staleness"], self.training is not None
        batches = staleness["async_batches"]
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
        self, spec: Json, remaining: int, rewards: Sequence[float | None], *, waits: bool = False
    ) -> None:
        """Update a group: finished, doomed, or neither; it is not finished while it waits."""
        rules, name = self._config["rollout"], spec["group"]
        if name not in self._u:
            return
        valid = [reward for reward in rewards if reward is not None]
        if len(valid) + remaining < min(rules["min_valid_trajectories"], spec["size"]):
            self.leave(name)
        elif not remaining and not waits:
            if rules["filter_zero_advantage"] and len(set(valid)) <= 1:
                self.leave(name)
            else:
                self._finished[name] = spec

    def leave(self, name: str) -> None:
        self._u.pop(name, None)
        self._finished.pop(name, None)

    @property
    def _held(self) -> list[str]:
        return [name for part in self._parts for name in part]

    def _due(self, committed: int) -> list[int]:
        """Return the deadlines of U; parts are due at the next step."""
        held, step = {*self._held}, committed + (self.training is not None)
        return [step if name in held else spec["deadline"] for name, spec in self._u.items()]

    def _earliest(self, count: int) -> list[str]:
        held = {*self._held}
        free = [spec for name, spec in self._finished.items() if name not in held]
        free.sort(key=lambda spec: (spec["deadline"], spec["ordinal"]))
        return [spec["group"] for spec in free[:count]]

    def _not_next(self, decision: Json, step: int) -> Iterator[str]:
        if decision["step"] != step:
            yield f"is taken although step {step} comes next"

    def _has_parts(self, count: int) -> None:
        """Restore parts if the decision's count shows that a `set` was refused."""
        if count > len(self._parts):
            self._parts = self._given_up
        self._parts, self._given_up = self._parts[:count], []

    def take_part(self, decision: Json, committed: int) -> Iterator[str]:
        """Take a part; yield what is wrong.

        A repeated number shows that a command gave up that part and later ones.
        """
        step = committed + (self.training is not None)
        yield from self._not_next(decision, step)
        self._has_parts(decision["part"])
        if self.training is not None and self._parts:
            yield f"has a second part while step {self.training[0]} trains"
        taken = [group["group"] for group in decision["groups"]]
        if taken != self._earliest(len(taken)):
            yield "has a part that is not of the earliest deadlines"
        self._parts.append(taken)
        if len(self._held) >= self._per_step:
            yield "has a part that leaves nothing for the batch"
        if not feasible(self._due(committed), step, self._per_step):
            yield "has a part that leaves no room for groups that are due"

    def _counts_otherwise(self, decision: Json) -> Iterator[str]:
        """Check an automatic `async_batches`: 2 to the bound, changes up to a quarter."""
        batches, staleness = decision.get("in_flight"), self._config["staleness"]
        if self.commanded:
            return
        if (batches is not None) != (staleness["async_batches"] == "auto"):
            yield "says how many batches are in flight where that is set, or does not where it must"
        elif batches is not None:
            before, most = self._in_flight, max(2, staleness["max_staleness"] + 1)
            decided = 2 <= batches <= most and abs(batches - min(before, most)) <= 0.25
            if batches != before and not decided:
                yield f"has {batches} batches in flight behind {before}"
            self._in_flight = batches

    def take(self, decision: Json, committed: int) -> Iterator[str]:
        """Take a batch with its remaining parts; yield what is wrong."""
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
        taken = [group["group"] for group in decision["groups"]]
        if taken != due:
            yield f"is not of the earliest deadlines: {sorted({*taken} ^ {*due})[:4]}"
        self._parts = []
        for name in taken:
            self.leave(name)
        if not feasible(self._due(committed), committed + 1, self._per_step):
            yield "leaves groups behind that cannot be in time"
        self.training = decision["step"], decision["attempt"]

    def give_back(self, specs: Sequence[Json]) -> None:
        """Return a refused batch's groups, except the offenders."""
        for spec in specs:
            self._u[spec["group"]] = self._finished[spec["group"]] = spec
        self._end_training()

    def _end_training(self) -> None:
        self.training, self._parts, self._given_up = None, [], []

    def command(self, verb: str, args: dict[str, Any]) -> None:
        trains = self.training
        if verb == "fail-batch" and trains and args.get("step", trains[0]) == trains[0]:
            self._end_training()
        if verb == "set" and self._parts:
            self._parts, self._given_up = [], self._parts
        if verb == "stop" or (verb == "set" and args.keys() & MATTER):
            self.commanded = True
            if "staleness.max_staleness" in args:
                self._staleness.add(args["staleness.max_staleness"])

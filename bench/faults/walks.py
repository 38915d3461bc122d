"""What became of the episodes at servers whose workers were killed, from the log and from what
their environments wrote down: a line for each step, before it was made.

An environment begins where chance has it, so that no two answer alike. Each trajectory must be the
steps of one environment, all of them and in their order: then none was lost, and none was made
again. An environment that made steps for no trajectory has made them for one that was still open
when the run ended; where there is none of its row, an episode was begun a second time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bench.faults.episodes import SERVED, STEP_S, WALK, Walks
from dora_pipe.bench.faults.inject import Hit
from dora_pipe.bus.port import Bus
from dora_pipe.schemas.rounds import Dispatch, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory

STEP_NS: Final = round(STEP_S * 1e9)

Text = Callable[[Sequence[int]], str]
"""Token ids to what an environment is told, and tells."""


class Walked(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a run's episodes at servers. `clean` is whether nothing is wrong."""

    episodes: int
    """Trajectories of theirs in the log."""
    carried: int
    """Of these, such as certainly another worker, or another start of the same one, has gone on
    with."""
    steps: int
    """That environments have begun."""
    under_way: int
    """Workers that were killed while a step was under way for them."""
    lost: int
    """Trajectories that are not the steps of one environment."""
    twice: int
    """Environments that made steps for no trajectory, ended or open."""

    @property
    def clean(self) -> bool:
        """Whether no step was lost, and none made twice."""
        return self.lost == self.twice == 0 < self.steps


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A line that an environment wrote."""

    walk: str
    pid: int
    """Of the server's process."""
    at_ns: int
    """This machine's monotonic clock."""
    numbers: tuple[int, ...]
    """Its row."""
    said: str
    answer: str


def read_step(line: bytes) -> Step:
    """A line as its environment wrote it."""
    return msgspec.json.decode(line, type=Step)


Exchange = tuple[str, str]
"""What the model said, and what it was answered."""
Episode = tuple[tuple[int, ...], tuple[Exchange, ...]]
"""A row, and all that happened."""


def walked_once(bus: Bus, topics: Topics, walked: Path, hits: Iterable[Hit], text: Text) -> Walked:
    """Compare the log with the steps that environments wrote down. Raises BusError, SchemaError."""
    rows = [tuple(row["numbers"]) for row in Walks().rows("train")]
    walks = _walks(walked)
    made: dict[Episode, list[Sequence[Step]]] = defaultdict(list)
    for steps in walks:
        made[steps[0].numbers, tuple((one.said, one.answer) for one in steps)].append(steps)
    struck = {hit.walk: hit.at_ns for hit in hits if hit.walk}
    ended = {one.trajectory: one for one in _trajectories(bus, topics)}
    missed = _dispatched(bus, topics, rows)
    lost = carried = 0
    for one in ended.values():
        row = rows[one.meta.index]
        missed[row] -= 1
        told = tuple(_exchanges(one, text))
        if not told:
            continue
        found = made[row, told]
        if not found:
            lost += 1
            continue
        carried += found.pop()[0].walk in struck or len(_incarnations(one)) > 1
    rest = Counter(row for (row, _), found in made.items() for _ in found)
    return Walked(
        episodes=len(ended),
        carried=carried,
        steps=sum(map(len, walks)),
        under_way=sum(
            0 < struck.get(one.walk, 0) - one.at_ns < STEP_NS for steps in walks for one in steps
        ),
        lost=lost,
        twice=sum((rest - missed).values()),
    )


def _walks(path: Path) -> list[list[Step]]:
    """The steps of each environment, in order; all lines are whole."""
    found: dict[str, list[Step]] = defaultdict(list)
    for line in path.read_bytes().splitlines():
        step = read_step(line)
        found[step.walk].append(step)
    return list(found.values())


def _trajectories(bus: Bus, topics: Topics) -> Iterator[Trajectory]:
    for record in records_of(bus, ends_of(bus, topics.trajectories)):
        one = decode_trajectory(record.value)
        if one.meta.task == SERVED:
            yield one


def _dispatched(
    bus: Bus, topics: Topics, rows: Sequence[tuple[int, ...]]
) -> Counter[tuple[int, ...]]:
    """How many siblings were dispatched of each row."""
    found: Counter[tuple[int, ...]] = Counter()
    for record in records_of(bus, ends_of(bus, topics.decisions)):
        for one in decode_round(record.value).decisions:
            if isinstance(one, Dispatch) and one.spec.task == SERVED:
                found[rows[one.spec.index]] += one.spec.siblings
    return found


def _exchanges(one: Trajectory, text: Text) -> Iterator[Exchange]:
    """The turns that were answered: an environment knows nothing of one that a limit has cut."""
    said: list[int] = []
    for segment in one.segments:
        ids = one.token_ids[segment.start : segment.end]
        if segment.kind == "model":
            said += ids
        elif segment.tool == WALK:
            yield text(said), text(ids)
            said = []


def _incarnations(one: Trajectory) -> set[tuple[str, int]]:
    return {(part.worker, part.epoch) for part in one.segments if part.kind == "model"}

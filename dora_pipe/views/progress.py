"""One line per training step, from the control topic alone: what a person wants to see of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dora_pipe.bus.port import Bus, Record, TopicPartition
from dora_pipe.errors import SchemaError
from dora_pipe.schemas.control import (
    BatchRefused,
    RunStarted,
    StepCommitted,
    TrajectoriesLogged,
    TrajectoryLogged,
    WeightsAdopted,
    WorkerJoined,
    WorkerLeft,
    decode_control,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.views.alarms import Alarms

POLL_RECORDS_MAX = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """What one committed step was."""

    step: int
    reward: float | None
    """Mean of the batch's valid rewards."""
    staleness: tuple[tuple[int, int], ...]
    """(staleness, groups)."""
    loss: float | None
    tokens: int
    tokens_per_s: float
    """Sampled tokens of the batch over the time since the commit before."""
    seconds: float

    def text(self) -> str:
        """As one line."""
        reward = "  -  " if self.reward is None else f"{self.reward:5.3f}"
        staleness = " ".join(f"{value}:{count}" for value, count in self.staleness)
        return (
            f"step {self.step:>4}  reward {reward}  staleness {staleness:<16}"
            f"  {self.tokens_per_s:>7,.0f} tok/s  {self.seconds:5.2f} s"
        )


class Progress:
    """Follows a run's control topic; `lines` are what happened since the last call.

    With `alarms`, theirs are among the lines. Memory is bounded by the trajectories in flight: a
    commit takes its batch's out.
    """

    def __init__(
        self, bus: Bus, topics: Topics, *, position: int = 0, alarms: Alarms | None = None
    ) -> None:
        self._alarms = alarms
        self._reader = bus.reader({TopicPartition(topics.control, 0): position})
        self._logged: dict[str, tuple[float | None, int]] = {}
        self._evaluating: dict[int, dict[str, float | None]] = {}
        self._evaluation_size = 0
        self._committed_ns = 0
        self.steps: list[StepLine] = []
        self.evaluations: dict[int, float] = {}
        """Version to mean evaluation reward."""
        self.steps_last = 0

    def lines(self, timeout_s: float = 0.0) -> list[str]:
        """New lines for people."""
        out: list[str] = []
        records = self._reader.poll(timeout_s=timeout_s, records_max=POLL_RECORDS_MAX)
        for record in records:
            out.extend(self._take(record))
        return out + (self._alarms.lines() if self._alarms else [])

    def close(self) -> None:
        """Let go of the readers."""
        self._reader.close()
        if self._alarms:
            self._alarms.close()

    def _take(self, record: Record) -> Sequence[str]:
        try:
            control = decode_control(record.value)
        except SchemaError as error:
            return [f"unreadable control record at {record.offset}: {error.message}"]
        match control:
            case RunStarted() if not self.steps_last:  # a second one does not count
                evaluation = control.config["evaluation"]
                prompts = min(evaluation["prompts"], control.eval_rows)
                self._evaluation_size = prompts * evaluation["siblings"]
                self.steps_last = control.config["run"]["steps"]
            case TrajectoriesLogged():
                return [line for fact in control.facts() for line in self._logged_one(fact)]
            case StepCommitted():
                return [self._step(control).text()]
            case WorkerJoined():
                return [f"{control.worker} joined ({control.engine}, {control.slots} slots)"]
            case WorkerLeft():
                if self._alarms:
                    self._alarms.forget(control.worker, control.epoch)
                return [f"{control.worker} left: {control.reason}"]
            case BatchRefused():
                why = "; ".join(f"{one.trajectory}: {one.why}" for one in control.offenders)
                return [f"step {control.step}: batch refused: {why}"]
            case WeightsAdopted():
                return [f"step {control.step}: weights adopted: {control.why}"]
            case _:
                pass
        return []

    def _logged_one(self, control: TrajectoryLogged) -> Sequence[str]:
        if control.group.startswith("g"):
            self._logged[control.trajectory] = (control.reward, control.tokens)
            return []
        ended = self._evaluating.setdefault(control.version, {})
        ended[control.trajectory] = control.reward
        rewards = [reward for reward in ended.values() if reward is not None]
        if len(ended) != self._evaluation_size or not rewards:
            return []
        mean = sum(rewards) / len(rewards)
        self.evaluations[control.version] = mean
        del self._evaluating[control.version]
        return [f"evaluation of version {control.version}: reward {mean:.3f}"]

    def _step(self, control: StepCommitted) -> StepLine:
        rewards: list[float] = []
        tokens = 0
        for group in control.groups:
            for taken in group.trajectories:
                reward, sampled = self._logged.pop(taken.trajectory, (None, 0))
                tokens += sampled
                if reward is not None:
                    rewards.append(reward)
        staleness = Counter(control.step - group.version for group in control.groups)
        seconds = (control.at_ns - self._committed_ns) / 1e9 if self._committed_ns else 0.0
        self._committed_ns = control.at_ns
        line = StepLine(
            step=control.step,
            reward=sum(rewards) / len(rewards) if rewards else None,
            staleness=tuple(sorted(staleness.items())),
            loss=control.figures.get("loss"),
            tokens=tokens,
            tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
            seconds=seconds,
        )
        self.steps.append(line)
        return line

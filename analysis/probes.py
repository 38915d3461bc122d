"""Probes: a value per draw for any weights, from an evaluation of the run or a user's function.

The *draws* of an evaluation are its trajectories, row after row, then again with further seeds:

    2 rows of 2 trajectories:   draw    0  1  2  3  4  5 ...
                                group   0  0  1  1  2  2      2 is row 0 once more
                                sample  0  1  0  1  0  1

Groups and seeds are those of the run's own evaluation (`orchestrator.evaluations`), so draw i has
the same row and seed for all weights. A request that fails is repeated `groups.attempts_max` times
in all. A draw without a valid reward has no value.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from dora_pipe.analysis.worker_log import (
    Joined,
    WorkerLog,
    WorkerParts,
    alone,
    started_of,
    work_on,
)
from dora_pipe.bus import open_bus
from dora_pipe.bus.port import Bus
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config, Evaluation
from dora_pipe.config.several import SEVERAL, pool_specs, tables_of
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.core.errors import InvariantBroken, TaskError, UsageError, reason
from dora_pipe.core.own_code import importable, load_function
from dora_pipe.launch.run_dir import LOG, OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.orchestrator.evaluations import evaluation_group, evaluation_rows
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.worker.kept_parts import KeptParts
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.producers.worker.role import worker_config
from dora_pipe.schemas.control import (
    LoggedEntry,
    RequestFailed,
    RunStarted,
    TrajectoriesLogged,
    config_digest,
    error_class,
)
from dora_pipe.schemas.identity import derive_seed, group_id, source_of, trajectory_id
from dora_pipe.schemas.rounds import AnyDecision, GroupSpec, Place, PlacedSibling
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.fallbacks import Fallbacks
from dora_pipe.store.model_dir import write_policy_dir
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore

EVAL: Final = "eval"
NAME: Final = "probe"
"""Of the log, and of its worker."""

VERSION: Final = 1
"""Of the probed weights in that log."""

REASON: Final = "an evaluation by a probe"

Values = Sequence[float | None]
Report = Callable[[str, float, float | None], None]
Draw = tuple[int, int]
"""The ordinal of a group and the number of a trajectory in it."""


class Probe(Protocol):
    """Gives a value for every draw; draw i has the same row and seed for all weights."""

    @property
    def direction(self) -> float | None:
        """1 where more is better; None where the given versions tell."""
        ...

    def values(self, weights: Path, digest: str, draws: range) -> Values:
        """Values of draws; fewer where there are no more. Raises TaskError."""
        ...


@contextmanager
def opened_probe(
    run: OpenRun, probe: str, directory: Path | None, report: Report
) -> Iterator[Probe]:
    """Open `eval`, `eval:NAME` or `module:function`.

    Raises UsageError, ConfigError, TaskError, PolicyError.
    """
    kind, _, name = probe.partition(":")
    if kind == EVAL:
        with _evaluation(run, name, report) as found:
            yield found
        return
    started, _ = policy_after(run.bus, run.topics, 0)
    with importable(str((directory or Path()).resolve())):
        function = load_function("--probe", probe, UsageError)
        assets = run.policies.assets(started.assets_digest)
        yield FunctionProbe(probe=probe, function=function, store=run.policies, assets=assets)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionProbe:
    """A user's function: the folder of a model to a number, or one per row."""

    probe: str
    function: Any
    store: PolicyStore
    assets: Path
    direction: float | None = None

    def values(self, weights: Path, digest: str, draws: range) -> Values:
        """See the protocol; the rows exist once. Raises TaskError."""
        if draws.start:
            return []
        with tempfile.TemporaryDirectory(prefix="dora-pipe-probe-") as folder:
            model, dtype = Path(folder) / "model", read_manifest(weights).dtype
            write_policy_dir(self.store, weights, digest, dtype, self.assets, model)
            try:
                found = self.function(model)
                many = hasattr(found, "__len__")
                return [float(one) for one in found] if many else [float(found)]
            except Exception as error:  # A probe is a user's code.
                raise TaskError(f"--probe {self.probe}: {reason(error)}") from error


@dataclass(slots=True, kw_only=True)
class EvaluationProbe:
    """Rewards of an evaluation's rows, each sampled as a worker of the run samples it."""

    draws: EvaluationDraws
    local: Config
    """This machine's part of the worker's configuration."""
    store: PolicyStore
    kept: KeptParts
    report: Report
    direction: float | None = 1.0

    def values(self, weights: Path, digest: str, draws: range) -> Values:
        """See the protocol. Raises TaskError where no draw has a valid reward."""
        store = _OtherWeights(store=self.store, file=weights, digest=digest)
        parts = WorkerParts(
            store=store, config=self.local, engine=self.kept.engine, pool=self.kept.pool
        )
        with (
            tempfile.TemporaryDirectory(prefix="dora-pipe-probe-") as folder,
            closing(open_bus(f"sqlite:{Path(folder) / LOG}")) as bus,
        ):
            log = WorkerLog(bus=bus, topics=Topics(NAME), reason=REASON)
            log.begin(self.draws.started, hint="")
            work = work_on(log, NAME, parts, phase="probe", total=len(draws), report=self.report)

            def ask(joined: Joined) -> None:
                work(joined)
                self.kept.forget(VERSION)

            asking = _Asking(bus=bus, log=log, draws=self.draws, digest=digest)
            values, errors = asking.values(draws, ask)
        _check(values, errors)
        return values


def _check(values: Values, errors: Mapping[str, int]) -> None:
    """Name the draws without a value. Raises TaskError where none has one."""
    missing, many = sum(errors.values()), len(values)
    why = ", ".join(f"{name or 'no reason'} {count}" for name, count in errors.items())
    if missing and missing == many:
        raise TaskError(f"no draw has a valid reward: {why}")
    if missing:
        say(f"{missing} of {many} draws have no valid reward and do not count: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherWeights:
    """The run's store, with one more policy."""

    store: PolicyStore
    file: Path
    digest: str

    def weights(self, digest: str) -> Path:
        return self.file if digest == self.digest else self.store.weights(digest)

    def verify(self, digest: str) -> object:
        return read_manifest(self.file) if digest == self.digest else self.store.verify(digest)

    @property
    def fallbacks(self) -> Fallbacks:
        return self.store.fallbacks

    def assets(self, digest: str) -> Path:
        return self.store.assets(digest)


@contextmanager
def _evaluation(run: OpenRun, name: str, report: Report) -> Iterator[EvaluationProbe]:
    first, _ = policy_after(run.bus, run.topics, 0)
    started = started_of(first, NAME)
    local = alone(run.config, run.config.workers.engine)
    started = asking_only(started, _named(worker_config(started, local), name))
    config = worker_config(started, local)
    draws = EvaluationDraws(started=started, config=config, evaluation=config.evaluation)
    if not draws.rows:
        raise UsageError(
            f"evaluation {name or EVAL} of this run has no rows",
            hint="task.eval_data or task.eval_share of the run; or --probe module:function",
        )
    if source_of("eval", config.evaluation.name) in started.scored_together:
        raise UsageError(
            f"evaluation {config.evaluation.name!r} scores its trajectories in groups",
            hint="--probe module:function",
        )
    report("opening the task", 0, None)
    with closing(KeptParts(open_engine)) as kept:
        pools = [kept.pool(one.task, clock=SystemClock()) for one in pool_specs(config)]
        for pool in pools:
            pool.wait()
        assets = run.policies.assets(started.assets_digest)
        kept.engine(assets=assets, config=config, decode=Tokenizer(assets).full_text)
        yield EvaluationProbe(
            draws=draws, local=local, store=run.policies, kept=kept, report=report
        )


def _named(config: Config, name: str) -> Evaluation:
    """The evaluation of a name; without one, the only one. Raises UsageError."""
    found = {one.name: one for one in config.evaluations}
    if name not in found and (name or len(found) > 1):
        known = ", ".join(f"eval:{one}" if one else EVAL for one in found)
        raise UsageError(f"no evaluation {name!r}", hint=f"there are: {known}")
    return found.get(name) or config.evaluations[0]


def asking_only(started: RunStarted, evaluation: Evaluation) -> RunStarted:
    """`run started` of a log with this evaluation alone: its worker starts no other task."""
    names = {
        "task": logged_config(started.config).task_of(evaluation).name,
        "evaluation": evaluation.name,
    }
    plain = dict(started.config)
    for section, name in names.items():
        several = tables_of(plain, section)
        if len(several) > 1:
            plain[section] = next(one for one in several if one.get("name", "") == name)
            del plain[SEVERAL[section][0]]
    return msgspec.structs.replace(started, config=plain, config_digest=config_digest(plain))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDraws:
    """The draws of an evaluation of a run; see the module."""

    started: RunStarted
    config: Config
    evaluation: Evaluation

    @property
    def rows(self) -> int:
        """How many rows the evaluation has."""
        return evaluation_rows(self.started, self.evaluation)

    def draw(self, number: int) -> Draw:
        """The group and trajectory of a draw."""
        return divmod(number, self.evaluation.siblings)

    def spec(self, ordinal: int, digest: str) -> GroupSpec:
        """The group with this ordinal, for weights with this digest."""
        again, row = divmod(ordinal, self.rows)
        spec = evaluation_group(
            self.started,
            self.config,
            self.evaluation,
            row,
            ordinal=ordinal,
            version=VERSION,
            digest=digest,
        )
        seed = derive_seed("draw", spec.seed, again) if again else spec.seed
        return msgspec.structs.replace(spec, seed=seed, partition=0)


@dataclass(slots=True, kw_only=True)
class _Answers:
    """The trajectories and failed requests of a log."""

    attempts_max: int
    entries: dict[str, LoggedEntry] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Errors of requests that are not asked again."""
    faults: Counter[str] = field(default_factory=Counter)
    """Failed attempts, by trajectory."""

    def add(self, fact: Any) -> bool:
        """Take the next control record; whether it is an answer."""
        match fact:
            case TrajectoriesLogged():
                for one in fact.trajectories:
                    self.entries.setdefault(one.trajectory, one)
            case RequestFailed():
                self.faults[fact.trajectory] += 1
                if not fact.retryable or self.faults[fact.trajectory] >= self.attempts_max:
                    self.lost[fact.trajectory] = f"{fact.error}: {fact.message}"
            case _:
                return False
        return True

    def reward(self, name: str) -> float | None:
        """The reward of a trajectory, None without a valid one."""
        entry = self.entries.get(name)
        return None if entry is None else entry.reward

    def error(self, name: str) -> str:
        """The class of the error of a trajectory without a reward."""
        entry = self.entries.get(name)
        return error_class(self.lost.get(name, "") if entry is None else entry.error)


def _name(draw: Draw) -> str:
    group, sample = draw
    return trajectory_id(group_id("eval", group), sample)


@dataclass(slots=True, kw_only=True)
class _Asking:
    """Has workers sample draws on a log, one worker after the other, until all have ended."""

    bus: Bus
    log: WorkerLog
    draws: EvaluationDraws
    digest: str

    def values(
        self, draws: range, ask: Callable[[Joined], None]
    ) -> tuple[Values, Mapping[str, int]]:
        """Values of the draws, and the errors of those without one.

        Raises InvariantBroken for a worker that leaves without an answer.
        """
        answers = _Answers(attempts_max=self.draws.config.groups.attempts_max)
        wanted, read = {_name(draw): draw for draw in map(self.draws.draw, draws)}, 0
        while missing := wanted.keys() - answers.entries.keys() - answers.lost.keys():
            left = [draw for name, draw in wanted.items() if name in missing]
            ask(partial(self._place, answers, left))
            answered = [answers.add(fact) for _, fact in self.log.control(read)]
            read = self.log.end
            if not any(answered):
                raise InvariantBroken("the worker of the probe left without an answer")
        values = [answers.reward(name) for name in wanted]
        pairs = zip(wanted, values, strict=True)
        return values, Counter(answers.error(name) for name, value in pairs if value is None)

    def _place(
        self,
        answers: _Answers,
        wanted: Sequence[Draw],
        setup: WorkerSetup,
        facts: Mapping[str, TaskFacts],
    ) -> None:
        """Have the worker that has joined sample as many draws as it takes."""
        by_group: dict[int, list[int]] = {}
        for group, sample in wanted[: setup.requests_max]:
            by_group.setdefault(group, []).append(sample)
        places: list[AnyDecision] = [
            Place(
                reason=REASON,
                spec=self.draws.spec(group, self.digest),
                worker=setup.worker,
                epoch=setup.epoch,
                siblings=tuple(
                    PlacedSibling(sibling=one, attempt=1 + answers.faults[_name((group, one))])
                    for one in samples
                ),
            )
            for group, samples in by_group.items()
        ]
        with closing(self.bus.writer()) as writer:
            self.log.decide(
                writer,
                setup,
                places,
                version=VERSION,
                digest=self.digest,
                now_ns=self.draws.started.at_ns,
            )

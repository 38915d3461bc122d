"""Probes: a value per draw for any weights, from an evaluation or a user's function.

The *draws* of an evaluation are its trajectories, row by row, then again with new seeds:

    2 rows of 2 trajectories:   draw    0  1  2  3  4  5 ...
                                group   0  0  1  1  2  2      2 is row 0 once more
                                sample  0  1  0  1  0  1

Draw i has the same row and seed for all weights, as in `orchestrator.curriculum`.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

import msgspec

from dora_pipe.analysis.worker_log import (
    Report,
    SampleRequest,
    TemporaryWorker,
    WorkerParts,
    alone,
    started_of,
)
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config, Evaluation, Task
from dora_pipe.config.several import SEVERAL, pool_specs, tables_of
from dora_pipe.core.errors import TaskError, UsageError, reason
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.core.system.console import say
from dora_pipe.core.system.own_code import importable, load_function
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import first_record
from dora_pipe.orchestrator.curriculum import evaluation_group, evaluation_rows
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.engine import Engine
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.worker.role import worker_config
from dora_pipe.schemas.control import RequestFailed, RunStarted, config_digest, error_class
from dora_pipe.schemas.identity import derive_seed, source_of
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.store.model_dir import write_policy_dir
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore

EVAL: Final = "eval"
VERSION: Final = 1

Values = Sequence[float | None]


class Probe(Protocol):
    @property
    def direction(self) -> float | None:
        """1: more is better; None: the given versions define it."""
        ...

    def values(self, weights: Path, digest: str, draws: int) -> Values:
        """Return up to `draws` values. Raises TaskError."""
        ...


@contextmanager
def opened_probe(
    run: OpenRun, probe: str, directory: Path | None, report: Report
) -> Iterator[Probe]:
    """Open `eval`, `eval:NAME` or `module:function`. Raises UsageError, ConfigError, TaskError,
    PolicyError."""
    kind, _, name = probe.partition(":")
    if kind == EVAL:
        with _evaluation(run, name, report) as evaluation:
            yield evaluation
        return
    started = first_record(run.bus, run.topics)
    with importable(str((directory or Path()).resolve())):
        function = load_function("--probe", probe, UsageError)
        assets = run.policies.assets(started.assets_digest)
        yield FunctionProbe(probe=probe, function=function, store=run.policies, assets=assets)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionProbe:
    """User function from a model directory to one value, or one per row."""

    probe: str
    function: Any
    store: PolicyStore
    assets: Path
    direction: float | None = None

    def values(self, weights: Path, digest: str, draws: int) -> Values:
        """Return all values of the function. Raises TaskError."""
        with tempfile.TemporaryDirectory(prefix="dora-pipe-probe-") as folder:
            model, dtype = Path(folder) / "model", read_manifest(weights).dtype
            write_policy_dir(self.store, weights, digest, dtype, self.assets, model)
            try:
                scores = self.function(model)
                many = hasattr(scores, "__len__")
                return [float(score) for score in scores] if many else [float(scores)]
            except Exception as error:  # user code
                raise TaskError(f"--probe {self.probe}: {reason(error)}") from error


@dataclass(slots=True, kw_only=True)
class EvaluationProbe:
    """Rewards of an evaluation, sampled as in the run."""

    started: RunStarted
    config: Config
    local: Config
    store: PolicyStore
    engine: Engine
    pools: Sequence[tuple[Task, TaskPool]]
    report: Report
    direction: float | None = 1.0

    def values(self, weights: Path, digest: str, draws: int) -> Values:
        """Sample the draws. Raises TaskError without a valid reward."""
        parts = WorkerParts(
            store=_OtherWeights(store=self.store, file=weights, digest=digest),
            config=self.local,
            engine=lambda **_: cast("Engine", _Kept(self.engine)),
            pool=self._pool,
            left=lambda: self.engine.drop(VERSION),
        )
        worker = TemporaryWorker(
            started=self.started,
            parts=parts,
            version=VERSION,
            digest=digest,
            reason="an evaluation by a probe",
            report=self.report,
        )
        requests = [self._wanted(draw, digest) for draw in range(draws)]
        sampled = worker.sample(requests)
        results = [sampled[request.name] for request in requests]
        _check(results)
        return [result.reward if isinstance(result, Trajectory) else None for result in results]

    def _pool(self, task: Task, *, clock: Clock) -> TaskPool:
        pool = next(pool for own, pool in self.pools if own == task)
        return cast("TaskPool", _Kept(pool))

    def _wanted(self, draw: int, digest: str) -> SampleRequest:
        evaluation = self.config.evaluation
        ordinal, sample = divmod(draw, evaluation.group_size)
        again, row = divmod(ordinal, evaluation_rows(self.started, evaluation))
        spec = evaluation_group(
            self.started,
            self.config,
            evaluation,
            row,
            ordinal=ordinal,
            version=VERSION,
            digest=digest,
        )
        seed = derive_seed("draw", spec.seed, again) if again else spec.seed
        spec = msgspec.structs.replace(spec, seed=seed, partition=0)
        return SampleRequest(spec=spec, sample=sample)


def _check(results: Sequence[Trajectory | RequestFailed]) -> None:
    errors = Counter(
        result.error
        if isinstance(result, RequestFailed)
        else error_class(result.meta.reward_error or "")
        for result in results
        if isinstance(result, RequestFailed) or result.reward is None
    )
    missing, many = errors.total(), len(results)
    why = ", ".join(f"{name} {count}" for name, count in errors.items())
    if missing and missing == many:
        raise TaskError(f"no draw has a valid reward: {why}")
    if missing:
        say(f"{missing} of {many} draws have no valid reward and are ignored: {why}")


class _Kept:
    """Engine or pool that its worker does not close."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherWeights:
    """Store with one more policy."""

    store: PolicyStore
    file: Path
    digest: str

    def weights(self, digest: str) -> Path:
        return self.file if digest == self.digest else self.store.weights(digest)

    def verify(self, digest: str) -> object:
        return read_manifest(self.file) if digest == self.digest else self.store.verify(digest)

    def assets(self, digest: str) -> Path:
        return self.store.assets(digest)


@contextmanager
def _evaluation(run: OpenRun, name: str, report: Report) -> Iterator[EvaluationProbe]:
    started = started_of(first_record(run.bus, run.topics), "probe")
    local = alone(run.config, run.config.workers.engine)
    started = asking_only(started, _named(worker_config(started, local), name))
    config = worker_config(started, local)
    evaluation = config.evaluation
    if not evaluation_rows(started, evaluation):
        raise UsageError(
            f"evaluation {name or EVAL} of this run has no rows",
            hint="task.eval_data or task.eval_share of the run; or --probe module:function",
        )
    if source_of("eval", evaluation.name) in started.scored_together:
        raise UsageError(
            f"evaluation {evaluation.name!r} scores its trajectories in groups",
            hint="--probe module:function",
        )
    report("opening the task", 0, None)
    assets = run.policies.assets(started.assets_digest)
    with ExitStack() as stack:
        pools = [
            (pool.task, stack.enter_context(TaskPool(pool.task, clock=SystemClock())))
            for pool in pool_specs(config)
        ]
        for _, pool in pools:
            pool.wait()
        engine = open_engine(assets=assets, config=config, decode=Tokenizer(assets).full_text)
        stack.callback(engine.close)
        yield EvaluationProbe(
            started=started,
            config=config,
            local=local,
            store=run.policies,
            engine=engine,
            pools=pools,
            report=report,
        )


def _named(config: Config, name: str) -> Evaluation:
    """Return the named or only evaluation. Raises UsageError."""
    evaluations = {evaluation.name: evaluation for evaluation in config.evaluations}
    if name not in evaluations and (name or len(evaluations) > 1):
        names = ", ".join(
            f"eval:{evaluation}" if evaluation else EVAL for evaluation in evaluations
        )
        raise UsageError(f"no evaluation {name!r}", hint=f"there are: {names}")
    return evaluations.get(name) or config.evaluations[0]


def asking_only(started: RunStarted, evaluation: Evaluation) -> RunStarted:
    """Return a `run started` with one evaluation, to start no other task."""
    names = {
        "task": logged_config(started.config).task_of(evaluation).name,
        "evaluation": evaluation.name,
    }
    plain = dict(started.config)
    for section, name in names.items():
        several = tables_of(plain, section)
        if len(several) > 1:
            plain[section] = next(
                section_entry for section_entry in several if section_entry.get("name", "") == name
            )
            del plain[SEVERAL[section][0]]
    return msgspec.structs.replace(started, config=plain, config_digest=config_digest(plain))

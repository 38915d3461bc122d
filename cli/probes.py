"""Probes of `bisect`: an evaluation of the run, sampled here, or a function of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any, Final, Protocol

import msgspec

from dora_pipe.analysis.evaluation_log import (
    NAME,
    VERSION,
    DrawValues,
    EvaluationDraws,
    EvaluationLog,
    asking_only,
)
from dora_pipe.analysis.worker_log import Joined, Work, WorkerParts, alone, started_of, work_on
from dora_pipe.audit.bisect import Values
from dora_pipe.audit.measuring import DrawnValues
from dora_pipe.audit.repeat_steps import MadeWeights
from dora_pipe.bus import open_bus
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.config.model import Config, Evaluation
from dora_pipe.config.several import pool_specs
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.core.errors import TaskError, UsageError, reason
from dora_pipe.core.own_code import importable, load_function, source_sha256
from dora_pipe.launch.run_dir import LOG, OpenRun, RunDir, locked, opened
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.producers.tasks.registry import reward_digest_of
from dora_pipe.producers.worker.kept_parts import KeptParts
from dora_pipe.producers.worker.role import worker_config
from dora_pipe.schemas.control import RunStarted
from dora_pipe.store.adapters import base_of, read_adapter, write_merged
from dora_pipe.store.fallbacks import Fallbacks
from dora_pipe.store.model_dir import write_model_dir
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore

EVAL: Final = "eval"

SAMPLED: Final = "sampled"
"""A folder with a log for all weights that were asked, by digest."""

CHECKPOINT: Final = "checkpoint"


class Probe(DrawnValues, Protocol):
    """What gives a value for every draw, and what its values are remembered by."""

    def begin(self, folder: Path) -> None:
        """Hear where it may keep what it needs until the command is done; before any value."""
        ...

    @property
    def digest(self) -> str:
        """sha256 of its code."""
        ...

    @property
    def engine(self) -> str:
        """Name and version of what samples; empty where nothing does."""
        ...

    @property
    def direction(self) -> float | None:
        """1 where more is better; None: nobody knows."""
        ...


@contextmanager
def opened_probe(
    run: OpenRun, words: str, directory: Path | None, report: CommandProgress
) -> Iterator[Probe]:
    """A probe as it was named: `eval`, `eval:NAME` or `module:function`.

    Raises UsageError, ConfigError, TaskError, PolicyError.
    """
    kind, _, name = words.partition(":")
    if kind == EVAL:
        with _evaluation(run, name, report) as probe:
            yield probe
        return
    started, _ = policy_after(run.bus, run.topics, 0)
    with importable(str((directory or Path()).resolve())):
        function = load_function("--probe", words, UsageError)
        yield FunctionProbe(
            words=words,
            function=function,
            digest=source_sha256(words),
            store=run.policies,
            assets=run.policies.assets(started.assets_digest),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherWeights:
    """The run's store, and weights beside it."""

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


@dataclass(slots=True, kw_only=True)
class EvaluationProbe:
    """Rewards of an evaluation's rows, each sampled as a worker of the run samples it."""

    draws: EvaluationDraws
    local: Config
    """This machine's part of the worker's configuration."""
    store: PolicyStore
    kept: KeptParts
    digest: str
    """Of the code of the rewards."""
    engine: str
    report: CommandProgress
    folder: Path = Path()
    direction: float | None = 1.0

    def begin(self, folder: Path) -> None:
        """See the protocol."""
        self.folder = folder / SAMPLED

    def values(self, weights: Path, made: MadeWeights, first: int, last: int) -> Values:
        """See the protocol. Raises TaskError where no draw has a valid reward."""
        folder = self.folder / made.digest
        folder.mkdir(parents=True, exist_ok=True)
        store = _OtherWeights(store=self.store, file=weights, digest=made.digest)
        with locked(RunDir(folder)), closing(open_bus(f"sqlite:{folder / LOG}")) as bus:
            log = EvaluationLog(bus=bus, draws=self.draws, digest=made.digest)
            log.begin(self.draws.started)

            parts = WorkerParts(
                store=store, config=self.local, engine=self.kept.engine, pool=self.kept.pool
            )
            work = work_on(log.log, NAME, parts, phase=made.of, total=last, report=self.report)
            found = log.values(first, last, partial(self._work, work))
        _check(found, made.of)
        return found.values

    def _work(self, work: Work, joined: Joined) -> None:
        work(joined)
        self.kept.forget(VERSION)


def _check(found: DrawValues, of: str) -> None:
    """Say which draws have no value; raise TaskError where none has one."""
    if not found.errors:
        return
    missing, many = sum(found.errors.values()), len(found.values)
    why = ", ".join(f"{name or 'no reason'} {count}" for name, count in found.errors.items())
    if missing == many:
        raise TaskError(f"no draw of {of} has a valid reward: {why}")
    say(f"{missing} of {many} draws of {of} have no valid reward, and do not count: {why}")


@contextmanager
def _evaluation(run: OpenRun, name: str, report: CommandProgress) -> Iterator[EvaluationProbe]:
    started = started_of(sampled_as(run), NAME)
    local = alone(run.config, run.config.workers.engine)
    started = asking_only(started, _named(worker_config(started, local), name))
    config = worker_config(started, local)
    evaluation = config.evaluation
    draws = EvaluationDraws(started=started, config=config, evaluation=evaluation)
    if not draws.rows:
        raise UsageError(
            f"evaluation {evaluation.name!r} of this run has no rows", hint="evaluation.prompts"
        )
    report("opening the task")
    with closing(KeptParts(open_engine)) as kept:
        pools = [kept.pool(one.task, clock=SystemClock()) for one in pool_specs(config)]
        assets = run.policies.assets(started.assets_digest)
        decode = Tokenizer(assets).full_text
        engine = kept.engine(assets=assets, config=config, decode=decode)
        yield EvaluationProbe(
            draws=draws,
            local=local,
            store=run.policies,
            kept=kept,
            digest=reward_digest_of(pool.wait() for pool in pools),
            engine=f"{engine.name} {engine.version}",
            report=report,
        )


def sampled_as(run: OpenRun) -> RunStarted:
    """`run started`, and of a run without rollouts of its own, when that began whose rows it has:
    templates write the date into prompts."""
    started, _ = policy_after(run.bus, run.topics, 0)
    if not run.directory.lender:
        return started
    with opened(str(run.directory.path.parent / run.directory.lender)) as lender:
        lent, _ = policy_after(lender.bus, lender.topics, 0)
    return msgspec.structs.replace(started, at_ns=lent.at_ns)


def _named(config: Config, name: str) -> Evaluation:
    """The evaluation of a name; without one, the only one. Raises UsageError."""
    found = {one.name: one for one in config.evaluations}
    if name not in found and (name or len(found) > 1):
        known = ", ".join(f"eval:{one}" if one else EVAL for one in found)
        raise UsageError(f"no evaluation {name!r}", hint=f"there are: {known}")
    return found.get(name) or config.evaluations[0]


@dataclass(slots=True, kw_only=True)
class FunctionProbe:
    """A function of the user's: the folder of a checkpoint to a number, or one for every row."""

    words: str
    function: Any
    digest: str
    store: PolicyStore
    assets: Path
    folder: Path = Path()
    engine: str = ""
    direction: float | None = None

    def begin(self, folder: Path) -> None:
        """See the protocol."""
        self.folder = folder

    def values(self, weights: Path, made: MadeWeights, first: int, last: int) -> Values:
        """See the protocol; it has its rows once. Raises TaskError."""
        if first:
            return []
        directory = self.folder / CHECKPOINT
        write_model_dir(directory, self.assets, partial(self._write, weights), made.dtype)
        try:
            said = self.function(directory)
            return [float(one) for one in said] if hasattr(said, "__len__") else [float(said)]
        except Exception as error:  # A probe is anybody's code.
            raise TaskError(f"--probe {self.words}, {made.of}: {reason(error)}") from error

    def _write(self, weights: Path, path: Path) -> None:
        base = base_of(weights)
        if base is None:
            copyfile(weights, path)
        else:
            adapter = read_adapter(weights, digest=read_manifest(weights).digest)
            write_merged(self.store.weights(base), adapter, path)

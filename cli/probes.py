"""Probes of `bisect`: an evaluation of the run, sampled here, or a function of the user's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any, Final, Protocol

from dora_pipe.audit.bisect import Values
from dora_pipe.audit.measuring import DrawnValues
from dora_pipe.audit.reading import trajectories_of
from dora_pipe.audit.repeat_steps import MadeWeights
from dora_pipe.audit.rescore import rescore
from dora_pipe.audit.sampled_again import draws, sample_again
from dora_pipe.bus.logged import Damage
from dora_pipe.catalogue.database import COUNTS, logged_records
from dora_pipe.cli.output import raise_if_damaged
from dora_pipe.cli.replay import with_modules
from dora_pipe.cli.task_again import TaskAgain, chats_of_run, opened_task
from dora_pipe.config.logged import logged_config
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.errors import TaskError, UsageError, reason
from dora_pipe.core.own_code import importable, load_function, source_sha256
from dora_pipe.launch.local_roles import keeping_nothing
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.port import Engine, SamplingParams
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.producers.worker.role import params_by_source, worker_config
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.identity import source_of
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.store.adapters import base_of, read_adapter, write_merged
from dora_pipe.store.model_dir import write_model_dir
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore

EVAL: Final = "eval"

OWN: Final = "a probe of your own: --probe module:function, of the folder of a checkpoint"

ROWS: Final = """
    trajectory_id in (select trajectory_id from trajectories join groups g using (group_id)
    where g.fate = 'evaluated' and g.evaluation = ? and g.version = (
        select min(version) from groups where fate = 'evaluated' and evaluation = ?))"""
"""The trajectories of the first version that an evaluation is of: every row, every sibling."""


class Probe(DrawnValues, Protocol):
    """What gives a value for every draw, and what its values are remembered by."""

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
def opened_probe(run: OpenRun, words: str, directory: Path | None) -> Iterator[Probe]:
    """A probe as it was named: `eval`, `eval:NAME` or `module:function`.

    Raises UsageError, ConfigError, TaskError, PolicyError.
    """
    kind, _, name = words.partition(":")
    started, _ = policy_after(run.bus, run.topics, 0)
    if kind == EVAL:
        with _evaluation(run, started, name) as probe:
            yield probe
        return
    where = str((directory or Path()).resolve())
    with importable(where), tempfile.TemporaryDirectory(prefix="dora-pipe-probe-") as folder:
        function = load_function("--probe", words, UsageError)
        yield FunctionProbe(
            words=words,
            function=function,
            digest=source_sha256(words),
            store=run.policies,
            assets=run.policies.assets(started.assets_digest),
            folder=Path(folder),
        )


@dataclass(slots=True, kw_only=True)
class EvaluationProbe:
    """Rewards of an evaluation's rows."""

    rows: Sequence[Trajectory]
    engine_port: Engine
    params: dict[str, SamplingParams]
    task: TaskAgain
    base: tuple[Path, str] | None
    """Of a LoRA run, what adapters stand on: file and digest."""
    direction: float | None = 1.0

    @property
    def digest(self) -> str:
        """Of the code of the rewards."""
        return self.task.reward_digest

    @property
    def engine(self) -> str:
        """Name and version."""
        return f"{self.engine_port.name} {self.engine_port.version}"

    def values(self, weights: Path, made: MadeWeights, first: int, last: int) -> Values:
        """See the protocol. Raises TaskError where infrastructure loses an answer's reward."""
        engine = self.engine_port
        if self.base is not None:
            file, digest = self.base
            engine.load(file, version=0, digest=digest)
            engine.drop(0)
        engine.load(weights, version=1, digest=made.digest)
        wanted = draws(self.rows, first, last)
        answers = list(sample_again(engine, wanted, self.params))
        engine.drop(1)
        return self._scored(answers)

    def _scored(self, answers: Sequence[Trajectory]) -> Values:
        """Rewards, in their order; a row that is drawn twice is asked for in turn."""
        found: list[float | None] = []
        size = len(self.rows)
        for start in range(0, len(answers), size):
            some = answers[start : start + size]
            by_name: dict[str, float | None] = {}
            again = rescore(self.task.ports, some, clock=SystemClock(), stopped=self.task.stopped)
            for one in again:
                if one.lost:
                    raise TaskError(f"no reward of {one.trajectory}: {one.error}")
                by_name[one.trajectory] = one.found
            found += [by_name[one.trajectory] for one in some]
        return found


@contextmanager
def _evaluation(run: OpenRun, started: RunStarted, name: str) -> Iterator[EvaluationProbe]:
    config = with_modules(logged_config(started.config), run)
    names = [one.name for one in config.evaluations]
    if name not in names and (name or len(names) > 1):
        known = ", ".join(f"eval:{one}" if one else EVAL for one in names)
        raise UsageError(f"no evaluation {name!r}", hint=f"there are: {known}")
    name = name or names[0]
    rows = _rows(run, name)
    if not rows and run.directory.lender:  # A run without rollouts of its own.
        with opened(str(run.directory.path.parent / run.directory.lender)) as lender:
            rows = _rows(lender, name)
    if not rows:
        by = f" by {name}" if name else ""
        raise UsageError(f"no version was evaluated{by}, so there are no rows", hint=OWN)
    assets = run.policies.assets(started.assets_digest)
    tokenizer = Tokenizer(assets)
    with closing(run.tables()) as tables:
        chats = chats_of_run(tables, config, started, assets, tokenizer)
    base = None
    if config.lora.rank:
        base = run.policies.weights(started.policy.digest), started.policy.digest
    with ExitStack() as stack:
        task = stack.enter_context(opened_task(run, worker_config(started, run.config)))
        _check_one_turn(task, source_of("eval", name))
        engine = open_engine(
            assets=assets, config=keeping_nothing(config), decode=tokenizer.full_text
        )
        yield EvaluationProbe(
            rows=rows,
            engine_port=stack.enter_context(closing(engine)),
            params=params_by_source(config, tokenizer.stop_ids, chats),
            task=task,
            base=base,
        )


def _check_one_turn(task: TaskAgain, source: str) -> None:
    """Raise UsageError for an evaluation that is not one answer with a reward of its own."""
    why = ""
    if source not in task.single_turn:
        why = "has episodes of several turns"
    elif source in task.together:
        why = "scores siblings together"
    if why:
        raise UsageError(f"this evaluation {why}, which is not done here", hint=OWN)


def _rows(run: OpenRun, name: str) -> list[Trajectory]:
    """What was evaluated first, by row and sibling; none where nothing was. Raises
    InvariantBroken."""
    damage = Damage()
    with closing(run.tables()) as tables:
        logged = logged_records(tables, f"{COUNTS} and {ROWS}", [name, name])
    found = list(trajectories_of(run, logged, damage))
    raise_if_damaged(damage, ", and not asked")
    return sorted(found, key=lambda one: (one.meta.index, one.meta.sibling))


@dataclass(slots=True, kw_only=True)
class FunctionProbe:
    """A function of the user's: the folder of a checkpoint to a number, or one for every row."""

    words: str
    function: Any
    digest: str
    store: PolicyStore
    assets: Path
    folder: Path
    engine: str = ""
    direction: float | None = None

    def values(self, weights: Path, made: MadeWeights, first: int, last: int) -> Values:
        """See the protocol; it has its rows once. Raises TaskError."""
        if first:
            return []
        directory = self.folder / "checkpoint"
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

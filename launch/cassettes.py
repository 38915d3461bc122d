"""Cassettes of runs: the file that `task.cassette` means, and how one is made of a log.

A run's own cassette lies beside its log and is made of it once; the log is only read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.audit.run_cassette import NotReadable, recorded_of
from dora_pipe.bus.logged import Damage, logged_trajectory
from dora_pipe.catalogue.database import COUNTS, logged_records
from dora_pipe.config.model import Config, Task
from dora_pipe.config.several import pool_specs, with_each_task
from dora_pipe.core.console import say
from dora_pipe.core.errors import ConfigError, ResourceError, TaskError, UsageError
from dora_pipe.launch.run_dir import OpenRun, RunDir, find_run, opened
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calls import RowCall, RowDescribed, TaskFailed
from dora_pipe.producers.tasks.cassette import Recorded
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.registry import check_data
from dora_pipe.producers.worker.chats import recorded_chats
from dora_pipe.producers.worker.role import worker_config
from dora_pipe.schemas.trajectory import Trajectory

OF_A_RUN: Final = "cassette.jsonl"
"""In the directory of a run."""

WAIT_S: Final = 1.0

Report = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Made:
    """What became of a run's trajectories. Example: ``Made(answers=1200, trajectories=300)``."""

    answers: int = 0
    trajectories: int = 0
    """That have some."""
    left_out: Counter[str] = field(default_factory=Counter)
    """By why; of some a part, from where it could not be read back."""
    damage: Damage = field(default_factory=Damage)
    """Records that are not those that were logged."""


def with_cassettes(config: Config, root: Path) -> Config:
    """The configuration with the file of each cassette: of a run its own, which is made where it is
    missing. Raises ConfigError for a run whose cassette cannot be made, and a strict one that is
    nowhere."""
    return with_each_task(config, lambda one: _with_file(one, root))


def _with_file(task: Task, root: Path) -> Task:
    named = Path(task.cassette)
    if not task.cassette or named.is_file():
        return task
    run = RunDir(named) if RunDir(named).exists() else RunDir(root / named.name)
    if run.exists():
        return msgspec.structs.replace(task, cassette=str(cassette_of(str(run.path), root)))
    if named.is_dir() or not named.parent.is_dir():
        raise ConfigError(f"task.cassette: {named} is no file", hint="a file, or a run")
    if task.cassette_mode == "strict":
        raise ConfigError(
            f"task.cassette: there is no cassette {named}, and no run of that name in {root}",
            hint='task.cassette_mode = "record" makes one; export RUN --cassette FILE, too',
        )
    return task


def cassette_of(name: str, root: Path) -> Path:
    """The cassette of a run, or of a file itself; made of the run's log where it is missing."""
    if Path(name).is_file():
        return Path(name)
    path = find_run(name, root).path / OF_A_RUN
    if not path.is_file():
        with opened(name, root) as run:
            made = write_cassette(run, path, lambda *_: None)
        say(f"{path}: {said_of(made)}")
    return path.resolve()


def said_of(made: Made) -> str:
    left = "".join(f"; {count} left out: {why}" for why, count in made.left_out.most_common())
    return f"{made.answers} answers of {made.trajectories} trajectories{left}"


def write_cassette(run: OpenRun, path: Path, report: Report) -> Made:
    """Make the cassette of a run's trajectories that count. What is killed leaves no such file.

    Raises TaskError, ConfigError, ResourceError.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with closing(CassetteFile(partial)) as file, _readers(run, partial) as readers:
            made = Made()
            for one in _trajectories(run, made.damage, report):
                for line in _lines(readers[one.meta.source], one, made):
                    file.append(line)
        if not made.answers and not made.left_out:
            raise UsageError(f"run {run.topics.run} has asked no environment and no tool")
        partial.replace(path)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return made


@dataclass(slots=True, kw_only=True)
class _Reader:
    """What reads trajectories of a source."""

    pool: TaskPool
    words: Tokenizer
    chat: Chat | None
    run: str
    rows: dict[int, RowDescribed] = field(default_factory=dict)

    def row(self, one: Trajectory) -> RowDescribed:
        """Raises TaskError where the task cannot say it."""
        index = one.meta.index
        if index not in self.rows:
            name = one.trajectory
            self.pool.submit(RowCall(request=name, split=one.meta.purpose, index=index))
            while not (events := self.pool.poll(WAIT_S)):
                pass
            match events[0]:
                case RowDescribed() as found:
                    self.rows[index] = found
                case TaskFailed(error=error, message=message):
                    raise TaskError(f"row {index} of {one.meta.purpose}: {error}: {message}")
                case event:
                    raise TaskError(f"row {index} of {one.meta.purpose}: {event}")
        return self.rows[index]


def _lines(reader: _Reader, one: Trajectory, made: Made) -> Iterator[Recorded]:
    count = made.answers
    try:
        for line in recorded_of(one, reader.row(one), reader.words, reader.chat, reader.run):
            made.answers += 1
            yield line
    except NotReadable as why:
        made.left_out[str(why)] += 1
    made.trajectories += made.answers > count


@contextmanager
def _readers(run: OpenRun, path: Path) -> Iterator[dict[str, _Reader]]:
    """By source. The task's process records what servers of tools say of themselves."""
    started, _ = policy_after(run.bus, run.topics, 0)
    config = worker_config(started, run.config)
    assets = run.policies.assets(started.assets_digest)
    tokenizer = Tokenizer(assets)
    with closing(run.tables()) as tables:
        digests = {one for (one,) in tables.query("select template_digest from workers")} - {""}
    chats = recorded_chats(config, started.at_ns, assets, tokenizer, digests)
    found: dict[str, _Reader] = {}
    with ExitStack() as stack:
        for one in pool_specs(config):
            here = {"cassette": str(path), "cassette_mode": "record", "processes": 1}
            pool = stack.enter_context(TaskPool(msgspec.structs.replace(one.task, **here)))
            check_data(pool.wait(), started, one.sources)
            words = tokenizer.reading(one.task.special_tokens)
            for source in one.sources:
                found[source] = _Reader(
                    pool=pool,
                    words=words,
                    chat=chats.get(source),
                    run=f"{run.topics.run}@{started.at_ns}",
                )
        yield found


def _trajectories(run: OpenRun, damage: Damage, report: Report) -> Iterator[Trajectory]:
    with closing(run.tables()) as tables:
        left = logged_records(tables, COUNTS)
    count = len(left)
    if not count:
        raise UsageError(f"run {run.topics.run} has no trajectory that counts")
    for record in records_of(run.bus, ends_of(run.bus, run.topics.trajectories)):
        named = left.pop((record.partition, record.offset), None)
        if named is not None and damage.is_sound(record, named):
            report(f"reading answers, {count - len(left)} of {count} trajectories")
            yield logged_trajectory(record, named)
    damage.look_for_the_rest(left)

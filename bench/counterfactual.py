"""`bench counterfactual`: what the commands cost that ask a log what else could have been, each
beside something that does the same work with less around it.

Every command runs as a user types it, as a process of its own, from reading the log to its last
line; so does what stands beside it, but for the reward, which is called in a loop. What counts is
CPU time of a unit of work, that of all children included, and its ratio within a round; rounds take
the cases in turns. What a command keeps goes into the bench's folder, so that each begins anew.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora_pipe.audit.reading import trajectories_of
from dora_pipe.bench.whole_runs import run_whole, warm_start
from dora_pipe.bus.logged import Damage
from dora_pipe.catalogue.database import COUNTS, logged_records
from dora_pipe.config.load import load_config
from dora_pipe.config.several import pool_specs
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.core.own_code import importable
from dora_pipe.launch.plan import plan_new
from dora_pipe.launch.run_dir import opened
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.port import Completion, Row
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.schemas.trajectory import answer_of, turns_of

COMMAND_S_MAX: Final = 3600.0
"""Of one command; then it is ended."""

LOOK_S: Final = 0.02
"""Between two looks whether a command has ended."""

STEPS: Final = 8
"""Of the run that is made where none is given, and that are trained again."""

FORK: Final = ("--pieces", "4", "--samples", "64")
REPLAYED: Final = 512
"""Trajectories that are generated again, beside a fork."""

PROBE: Final = """from pathlib import Path

from safetensors.numpy import load_file


def of(folder):
    files = sorted(Path(folder).glob("*.safetensors"))
    found = {name: one for file in files for name, one in load_file(file).items()}
    return [float(abs(found[name].astype("float64")).mean()) for name in sorted(found)]
"""
"""A number of every tensor, in place of an evaluation: what is measured are steps."""

_MAIN: Final = "from dora_pipe.cli.main import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was done, and what it took."""

    work: int
    """Units."""
    seconds: float
    cpu_s: float

    @property
    def unit_us(self) -> float:
        """CPU time of a unit."""
        return self.cpu_s / max(1, self.work) * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterfactualFigure:
    """A command beside what does the same work; medians over the rounds."""

    command: str
    unit: str
    units: int
    seconds: float
    cpu_s: float
    unit_us: float
    """CPU time of a unit."""
    beside: str
    beside_units: int
    beside_cpu_s: float
    beside_unit_us: float
    ratio: float
    """Of the two for a unit: the median over the rounds."""
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchedRun:
    """A run that the commands are asked about, and a folder for what they keep."""

    words: str
    """How a command is told which run it is."""
    folder: Path

    def fresh(self) -> str:
        """A place that nobody has written to."""
        return tempfile.mkdtemp(dir=self.folder)

    def linked(self) -> list[str]:
        """The run in a folder of runs that nobody has written to: what is made of it lies there."""
        root, run = Path(self.fresh()), Path(self.words)
        (root / run.name).symlink_to(run.resolve(), target_is_directory=True)
        return [run.name, "--runs", str(root)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command, and what stands beside it."""

    command: str
    unit: str
    beside: str
    own: Callable[[BenchedRun], Spent]
    reference: Callable[[BenchedRun], Spent]


def made_run(place: Path) -> str:
    """Warm up the demo's model and train it for a few steps; the words for that run."""
    demo = warm_start(place / "start")
    model = place / "start" / "warm"
    words = [f'model.path="{model}"', 'run.name="benched"', f"run.steps={STEPS}"]
    plan = plan_new(load_config(demo, words), place)
    run_whole(plan)
    return str(plan.directory.path)


def command(words: Sequence[str], folder: Path) -> tuple[Spent, list[dict[str, Any]]]:
    """Run `dora-pipe` with `--json`; what it took (without work) and its lines.

    Raises UsageError with what it said last where it fails, ResourceError where it takes too long.
    """
    with tempfile.TemporaryFile(dir=folder) as out, tempfile.TemporaryFile(dir=folder) as err:
        began_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, *words, "--json"], stdout=out, stderr=err, cwd=folder
        )
        code, cpu_s = _ended(process.pid, began_s + COMMAND_S_MAX)
        process.returncode = code
        seconds = time.monotonic() - began_s
        out.seek(0)
        err.seek(0)
        if code:
            said = err.read().decode(errors="replace").strip().splitlines() or ["nothing"]
            raise UsageError(f"dora-pipe {words[0]} ended with {code}: {said[0]}")
        lines = [json.loads(line) for line in out if line.strip()]
    return Spent(work=0, seconds=seconds, cpu_s=cpu_s), lines


def _ended(pid: int, until_s: float) -> tuple[int, float]:
    """The exit code of a child, and CPU seconds of it and of all that it waited for."""
    while True:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGTERM)
            os.wait4(pid, 0)
            raise ResourceError(f"a command took more than {COMMAND_S_MAX:.0f} s")
        time.sleep(LOOK_S)


def _counted(
    words: Callable[[BenchedRun], Sequence[str]],
    units: Callable[[list[dict[str, Any]]], int],
) -> Callable[[BenchedRun], Spent]:
    """A command, and how many units of work its lines say."""

    def run(benched: BenchedRun) -> Spent:
        spent, lines = command(words(benched), benched.folder)
        return Spent(work=units(lines), seconds=spent.seconds, cpu_s=spent.cpu_s)

    return run


def own_reward(benched: BenchedRun) -> Spent:
    """The task's own reward, called in a loop for the texts that `rescore` asks; decoding them and
    reading rows is no part of it. Of a run with several tasks, those of the first."""
    with opened(benched.words) as run, importable(run.config.task.directory):
        task, asked = open_task(run.config.task), list(_texts(benched))
        rows = {split: task.rows(split) for split in ("train", "eval")}
        calls: list[tuple[Row, Completion]] = [
            (rows[split][index], completion) for split, index, completion in asked
        ]
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        for row, completion in calls:
            task.score(row, completion)
        cpu_s = time.process_time() - began_cpu_s
    return Spent(work=len(calls), seconds=time.monotonic() - began_s, cpu_s=cpu_s)


def _texts(benched: BenchedRun) -> Iterator[tuple[Any, int, Completion]]:
    """Split, row and text of every trajectory that counts and that an engine finished."""
    with opened(benched.words) as run:
        started, _ = policy_after(run.bus, run.topics, 0)
        sources = pool_specs(run.config)[0].sources
        decode = Tokenizer(run.policies.assets(started.assets_digest)).text
        with closing(run.tables()) as tables:
            left = logged_records(tables, COUNTS)
        for one in trajectories_of(run, left, Damage()):
            if one.meta.finish == "error" or one.meta.calls or one.meta.source not in sources:
                continue
            turns = [decode(ids) for _, ids in turns_of(one.segments, one.token_ids)]
            text = decode(answer_of(one))
            yield one.meta.purpose, one.meta.index, Completion(text=text, turns=turns)


def _forkable(benched: BenchedRun) -> str:
    """The longest trained trajectory of one context."""
    sql = """select trajectory_id from trajectories join groups g using (group_id)
             where calls = 0 and contexts = 1 and trajectories.reward is not null
               and purpose = 'train' order by trajectories.tokens desc, trajectory_id limit 1"""
    with opened(benched.words) as run, closing(run.tables()) as tables:
        found = tables.one(sql)
    if found is None:
        raise UsageError("no trajectory of this run can be continued")
    return str(found[0])


def bisected(benched: BenchedRun) -> Spent:
    """The newest steps looked into by a probe that tells any two versions apart; what it has
    remembered in the run's directory is removed. Raises UsageError where nothing was trained."""
    folder, newest = Path(benched.fresh()), _newest(benched)
    # Another digest than before: nothing is remembered of this probe.
    (folder / "norms.py").write_text(f"{PROBE}# {folder.name}\n")
    asked = ("--good", str(max(0, newest - STEPS)), "--bad", str(newest), "--steps", str(STEPS))
    words = ["bisect", benched.words, *asked, "--probe", "norms:of", "--directory", str(folder)]
    spent, (told,) = command(words, benched.folder)
    shutil.rmtree(told["folder"])
    found = told["explanation"] or {"steps": 0, "steps_as_they_were": 0}
    if not (steps := found["steps"] + found["steps_as_they_were"]):
        raise UsageError("the weights of this run have not grown: bisect has trained no step again")
    return Spent(work=steps, seconds=spent.seconds, cpu_s=spent.cpu_s)


def _newest(benched: BenchedRun) -> int:
    """The newest version."""
    with opened(benched.words) as run, closing(run.tables()) as tables:
        ((found,),) = tables.query("select max(version) from versions")
    return int(found)


def _audit_words(benched: BenchedRun) -> list[str]:
    index = str(Path(benched.fresh()) / "audit.sqlite")
    return ["audit", benched.words, "--fresh", "--no-store", "--index", index]


CASES: Final[tuple[Case, ...]] = (
    Case(
        command="rescore",
        unit="texts",
        beside="the task's own reward in a loop",
        own=_counted(
            lambda one: ["rescore", one.words, "--out", one.fresh()], lambda told: told[0]["asked"]
        ),
        reference=own_reward,
    ),
    Case(
        command="diff",
        unit="records",
        beside="audit --quick",
        own=_counted(
            lambda one: ["diff", one.words, one.words], lambda told: 2 * told[0]["compared"]
        ),
        reference=_counted(
            lambda one: [*_audit_words(one), "--quick"], lambda told: told[0]["records"]
        ),
    ),
    Case(
        command="fork",
        unit="tokens",
        beside="replay --random",
        own=_counted(
            lambda one: ["fork", one.words, _forkable(one), *FORK, "--out", one.fresh()],
            lambda told: sum(turn["sampled"] for turn in told[0]["turns"]),
        ),
        reference=_counted(
            lambda one: ["replay", one.words, "--random", str(REPLAYED)],
            lambda told: sum(line["tokens"] for line in told),
        ),
    ),
    Case(
        command="retrain",
        unit="steps",
        beside="replay of the same steps",
        own=_counted(
            lambda one: ["retrain", *one.linked(), "--name", "again", "--to", str(STEPS)],
            lambda told: len(told[0]["steps"]),
        ),
        reference=_counted(lambda one: ["replay", one.words, "--to", str(STEPS)], len),
    ),
    Case(
        command="bisect",
        unit="steps",
        beside="replay of the same number of steps",
        own=bisected,
        reference=_counted(lambda one: ["replay", one.words, "--to", str(STEPS)], len),
    ),
)
"""Every command that asks what else could have been has its row here."""


def bench_counterfactual(
    benched: BenchedRun, cases: Sequence[Case], rounds: int, say: Callable[[str], None]
) -> list[CounterfactualFigure]:
    """Each case in every round; one that the run does not have is named and left out."""
    spent: dict[str, list[tuple[Spent, Spent]]] = {}
    left = list(cases)
    for round_ in range(rounds):
        for case in list(left):
            try:
                order = (case.own, case.reference)[:: 1 if round_ % 2 else -1]
                found = [one(benched) for one in order][:: 1 if round_ % 2 else -1]
            except UsageError as error:
                say(f"without {case.command}: {error.message}")
                left.remove(case)
                continue
            own, beside = found
            say(
                f"round {round_ + 1}: {case.command} {own.seconds:.1f} s, {own.cpu_s:.1f} of CPU;"
                f" {case.beside} {beside.cpu_s:.1f}"
            )
            spent.setdefault(case.command, []).append((own, beside))
    return [figure_of(case, spent[case.command]) for case in left if case.command in spent]


def figure_of(case: Case, rounds: Sequence[tuple[Spent, Spent]]) -> CounterfactualFigure:
    """The figures of a case, from what every round took."""
    ratios = [own.unit_us / beside.unit_us for own, beside in rounds]
    own, beside = ([pair[side] for pair in rounds] for side in (0, 1))
    return CounterfactualFigure(
        command=case.command,
        unit=case.unit,
        units=own[0].work,
        seconds=statistics.median(one.seconds for one in own),
        cpu_s=statistics.median(one.cpu_s for one in own),
        unit_us=statistics.median(one.unit_us for one in own),
        beside=case.beside,
        beside_units=beside[0].work,
        beside_cpu_s=statistics.median(one.cpu_s for one in beside),
        beside_unit_us=statistics.median(one.unit_us for one in beside),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
    )

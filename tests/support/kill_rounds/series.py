"""Command `bench faults`: series of kill rounds."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from dora_pipe.cli.main import run_command
from dora_pipe.cli.options import JsonOption
from dora_pipe.cli.output import emit_json, emit_table
from dora_pipe.core.errors import InvariantBroken, UsageError
from dora_pipe.core.system.console import say
from tests.support.kill_rounds.brokers import CLUSTER
from tests.support.kill_rounds.order import (
    BROKER,
    KINDS,
    ROLE_KINDS,
    WORKERS,
    Kind,
    Order,
    order_of,
)
from tests.support.kill_rounds.rounds import CONTROL_FACTS, DEAD_S, RoundResult, Session

app = typer.Typer(add_completion=False)

TRIES_MAX: Final = 3
"""Attempts of a round whose moment never comes."""

SQLITE: Final = "sqlite"
KAFKA: Final = "kafka"

COLUMNS: Final = (
    "round",
    "seed",
    "role",
    "phase",
    "recovered s",
    "lost",
    "trained twice",
    "audit",
    "weights equal",
)


_ONLY_JSON: Final = ("steps", "acknowledged", "trajectories", "finished", "moved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    seed: int
    kinds: tuple[Kind, ...]
    """Targets in rotation."""
    only: Kind | None
    brokers: int
    """Number of brokers; 0 for SQLite."""
    dead_s: float = 0.0
    """Downtime of roles; 0: restart immediately."""


@app.command()
def faults(
    rounds: Annotated[
        int, typer.Option(min=1, help="How many; 30 hit every role 10 times on SQLite.")
    ] = 30,
    bus: Annotated[
        str, typer.Option(help="Where the log is: sqlite, or kafka (starts brokers of its own).")
    ] = "sqlite",
    brokers: Annotated[
        int, typer.Option(help="On Kafka: 1, or 3, and then leaders of partitions are killed.")
    ] = 1,
    role: Annotated[
        str | None,
        typer.Option(help="Kill only this one: worker, trainer, orchestrator or broker."),
    ] = None,
    stay_dead: Annotated[
        bool,
        typer.Option(
            "--stay-dead",
            help="Kill roles inside their appends, start them again after twice the lease.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Decides who is killed when.")] = 0,
    first: Annotated[int, typer.Option("--from", min=0, help="The first round.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Kill roles with SIGKILL at random and aimed moments; exit code 5 unless all is clean.

    On Kafka the broker is killed too.
    """
    series = series_of(bus, brokers, role, seed, stay_dead=stay_dead)
    folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".faults-"))
    played: list[RoundResult] = []
    with closing(Session(folder, brokers=series.brokers)) as session:
        for entry in play_rounds(session, series, range(first, first + rounds)):
            played.append(entry)
            if as_json:
                emit_json(row(entry))
    if not as_json:
        emit_table(COLUMNS, [list(row(result).values())[: len(COLUMNS)] for result in played])
    sum_up(played, folder)


def row(played: RoundResult) -> dict[str, Any]:
    verdict = played.verdict
    fields: dict[str, Any] = {} if verdict is None else msgspec.structs.asdict(verdict)
    return {
        "round": played.order.number,
        "seed": played.order.seed,
        "role": played.order.role,
        "phase": "the moment never came" if played.hit is None else played.hit.phase,
        "recovered_s": played.recovered_s,
        "lost": fields.get("lost"),
        "trained_twice": fields.get("trained_twice"),
        "audit": None if verdict is None else "broken" if verdict.violations else "clean",
        "weights_equal": None if verdict is None else verdict.weights_equal,
        **{name: fields.get(name) for name in _ONLY_JSON},
        "violations": fields.get("violations", ()),
        "others": fields.get("others", ()),
        "trouble": played.trouble,
        "seconds": played.seconds,
        "clean": played.clean,
    }


def sum_up(played: Sequence[RoundResult], folder: Path) -> None:
    """Print totals. Raises InvariantBroken unless every round was clean."""
    clean = sum(result.clean for result in played)
    verdicts = [result.verdict for result in played if result.verdict is not None]
    for line in _recovery(played):
        say(line)
    say(
        f"{clean} of {len(played)} rounds clean; "
        f"{sum(verdict.acknowledged for verdict in verdicts)} records acknowledged, "
        f"{sum(verdict.lost for verdict in verdicts)} lost, "
        f"{sum(verdict.trained_twice for verdict in verdicts)} trained twice; "
        f"{sum(verdict.trajectories for verdict in verdicts)} of them trajectories; "
        f"{sum(verdict.equal for verdict in verdicts)} steps replayed bit-equal"
    )
    if clean == len(played):
        shutil.rmtree(folder)
        return
    bad = next(result for result in played if not result.clean)
    raise InvariantBroken(
        f"round {bad.order.number} is not clean: {sentence_of(bad)}", hint=f"what is left: {folder}"
    )


def _recovery(played: Sequence[RoundResult]) -> list[str]:
    times: dict[str, list[float]] = {}
    for result in played:
        if result.recovered_s is not None:
            kind = "worker" if result.order.role in WORKERS else result.order.role
            times.setdefault(kind, []).append(result.recovered_s)
    every = [entry for time in times.values() for entry in time]
    named = [(f"time to recover, {kind}", times[kind]) for kind in KINDS if kind in times]
    named = [*(named if len(named) > 1 else ()), ("time to recover", every)]
    return [
        f"{words}: median {statistics.median(subset):.2f} s, worst {max(subset):.2f} s"
        for words, subset in named
        if subset
    ]


def series_of(bus: str, brokers: int, role: str | None, seed: int, *, stay_dead: bool) -> Series:
    if bus not in (SQLITE, KAFKA):
        raise UsageError(f"no bus {bus!r}", hint=f"one of {SQLITE}, {KAFKA}")
    if brokers not in (1, CLUSTER) or (brokers > 1 and bus == SQLITE):
        raise UsageError(f"{brokers} brokers on {bus}", hint=f"1 or {CLUSTER}, with --bus {KAFKA}")
    kinds: tuple[Kind, ...] = ROLE_KINDS
    if bus == KAFKA and not stay_dead:
        kinds = (BROKER,) if brokers == CLUSTER and role is None else KINDS
    only = next((kind for kind in kinds if kind == role), None)
    if role is not None and only is None:
        raise UsageError(f"no role {role!r} on {bus}", hint=f"one of {', '.join(kinds)}")
    return Series(
        seed=seed,
        kinds=kinds,
        only=only,
        brokers=brokers if bus == KAFKA else 0,
        dead_s=DEAD_S if stay_dead else 0.0,
    )


def play_rounds(session: Session, series: Series, numbers: Iterable[int]) -> Iterator[RoundResult]:
    """Play and report these rounds; clean ones are deleted."""
    session.model()
    for number in numbers:
        played = play_round(session, series, number)
        say(f"round {number}: {sentence_of(played)}")
        yield played
        if played.clean:
            session.forget(played.order)


def play_round(session: Session, series: Series, number: int) -> RoundResult:
    again = 0
    while True:
        order = _order(series, number, again)
        played = session.play(order)
        again += 1
        if played.hit is not None or played.trouble or again == TRIES_MAX:
            return played
        say(f"round {number}: the moment never came; drawn again")
        session.forget(order)


def _order(series: Series, number: int, again: int) -> Order:
    return order_of(
        series.seed,
        number,
        control_facts=CONTROL_FACTS,
        only=series.only,
        kinds=series.kinds,
        dead_s=series.dead_s,
        again=again,
    )


def sentence_of(played: RoundResult) -> str:
    if played.trouble:
        return f"NOT CLEAN, {played.order.role}: {played.trouble}"
    came_back = played.recovered_s is not None or not played.order.must_come_back
    if played.hit is None or not came_back or played.verdict is None:
        return f"NOT CLEAN, {played.order.role} was not struck, or never came back"
    what = "clean" if played.clean else f"NOT CLEAN ({played.verdict})"
    back = "not needed again"
    if played.recovered_s is not None:
        back = f"back after {played.recovered_s:.2f} s"
    return (
        f"{played.order.role} killed, {played.hit.phase}; {back}; {what} ({played.seconds:.1f} s)"
    )


if __name__ == "__main__":
    run_command("tests.support.kill_rounds.series")

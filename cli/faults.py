"""`bench faults`: kill -9 in round after round, and what was lost, doubled or changed by it."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dora_pipe.bench.faults.order import ROLE_KINDS, RoleKind, order_of
from dora_pipe.cli.fault_rounds import CONTROL_RECORDS, Played, Session
from dora_pipe.cli.output import emit_json, emit_table, say
from dora_pipe.errors import InvariantBroken, UsageError

TRIES_MAX: Final = 3
"""A moment that never came is drawn again; so many times in all."""

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


def faults(
    rounds: Annotated[int, typer.Option(min=1, help="How many; 30 hits every role 10 times.")] = 30,
    role: Annotated[
        str | None, typer.Option(help="Kill only this one: worker, trainer or orchestrator.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides who is killed when.")] = 0,
    first: Annotated[int, typer.Option("--from", min=0, help="The first round.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Kill roles with SIGKILL at random and aimed moments; exit code 5 unless all is clean."""
    only = _kind(role)
    folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".faults-"))
    played: list[Played] = []
    with closing(Session(folder)) as session:
        session.model()
        for number in range(first, first + rounds):
            one = _round(session, seed, number, only)
            played.append(one)
            say(f"round {number}: {_sentence(one)}")
            if as_json:
                emit_json(row(one))
            if one.clean:
                session.forget(one.order)
    if not as_json:
        emit_table(COLUMNS, [list(row(one).values())[: len(COLUMNS)] for one in played])
    sum_up(played, folder)


def row(played: Played) -> dict[str, Any]:
    """A round as the table shows it, then what only JSON shows."""
    verdict = played.verdict
    return {
        "round": played.order.number,
        "seed": played.order.seed,
        "role": played.order.role,
        "phase": "the moment never came" if played.hit is None else played.hit.phase,
        "recovered_s": played.recovered_s,
        "lost": None if verdict is None else verdict.lost,
        "trained_twice": None if verdict is None else verdict.trained_twice,
        "audit": None if verdict is None else "broken" if verdict.violations else "clean",
        "weights_equal": None if verdict is None else verdict.weights_equal,
        "steps": None if verdict is None else verdict.steps,
        "acknowledged": None if verdict is None else verdict.acknowledged,
        "finished": None if verdict is None else verdict.finished,
        "moved": None if verdict is None else verdict.moved,
        "violations": () if verdict is None else verdict.violations,
        "trouble": played.trouble,
        "seconds": played.seconds,
        "clean": played.clean,
    }


def sum_up(played: Sequence[Played], folder: Path) -> None:
    """The last lines. Raises InvariantBroken unless every round was clean."""
    recovered = [one.recovered_s for one in played if one.recovered_s is not None]
    clean = sum(one.clean for one in played)
    verdicts = [one.verdict for one in played if one.verdict is not None]
    if recovered:
        say(
            f"time to recover: median {statistics.median(recovered):.2f} s, "
            f"worst {max(recovered):.2f} s"
        )
    say(
        f"{clean} of {len(played)} rounds clean; "
        f"{sum(one.acknowledged for one in verdicts)} records acknowledged, "
        f"{sum(one.lost for one in verdicts)} lost, "
        f"{sum(one.trained_twice for one in verdicts)} trained twice; "
        f"{sum(one.equal for one in verdicts)} steps replayed bit-equal"
    )
    if clean == len(played):
        shutil.rmtree(folder)
        return
    bad = next(one for one in played if not one.clean)
    raise InvariantBroken(
        f"round {bad.order.number} is not clean: {_sentence(bad)}", hint=f"what is left: {folder}"
    )


def _kind(role: str | None) -> RoleKind | None:
    for kind in ROLE_KINDS:
        if role == kind:
            return kind
    if role is None:
        return None
    raise UsageError(f"no role {role!r}", hint=f"one of {', '.join(ROLE_KINDS)}")


def _round(session: Session, seed: int, number: int, only: RoleKind | None) -> Played:
    """Play a round; a moment that never came is drawn again."""
    again = 0
    while True:
        order = order_of(seed, number, control_records=CONTROL_RECORDS, only=only, again=again)
        played = session.play(order)
        again += 1
        if played.hit is not None or played.trouble or again == TRIES_MAX:
            return played
        say(f"round {number}: the moment never came; drawn again")
        session.forget(order)


def _sentence(played: Played) -> str:
    if played.trouble:
        return f"NOT CLEAN, {played.order.role}: {played.trouble}"
    if played.hit is None or played.recovered_s is None or played.verdict is None:
        return f"NOT CLEAN, {played.order.role} was not struck, or never came back"
    what = "clean" if played.clean else f"NOT CLEAN ({played.verdict})"
    return (
        f"{played.order.role} killed, {played.hit.phase}; back after "
        f"{played.recovered_s:.2f} s; {what} ({played.seconds:.1f} s)"
    )

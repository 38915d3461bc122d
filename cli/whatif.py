"""`dora-pipe whatif`: how long a finished run would have taken with other settings."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from dora_pipe.cli.output import emit_line, emit_pairs, emit_table

if TYPE_CHECKING:
    from dora_pipe.sim.whatif_facts import TurnValues


def plain_answers(measured: Any, answers: list[Any], error: float, cores: int) -> dict[str, Any]:
    """What JSON shows."""
    return {
        "error": error,
        "cores": cores,
        "turn_values": None if measured.turn_values is None else asdict(measured.turn_values),
        "speed": {
            "alone_ms": measured.speed.t0_s * 1e3,
            "per_active_ms": measured.speed.t1_s * 1e3,
            "slower_while_training": measured.speed.slower,
            "r2": measured.speed.r2,
        },
        "answers": [{name: getattr(one, name) for name in type(one).__slots__} for one in answers],
    }


def emit_answers(measured: Any, answers: list[Any], error: float, cores: int) -> None:
    """What a person sees."""
    speed = measured.speed
    emit_pairs(
        {
            "a token alone": f"{speed.t0_s * 1e3:.2f} ms",
            "more per active request": f"{speed.t1_s * 1e3:.3f} ms",
            "slower while a step trains": f"{speed.slower:.0%}",
            "explained of the requests' times": f"{speed.r2:.0%}",
            "a training step": (
                f"{measured.train_fixed_s:.2f} s + {measured.train_token_s * 1e3:.3f} ms per token"
                f", the first {measured.first_step_s:.1f} s more"
            ),
            "from response to record": f"{median(measured.reports_s) * 1e3:.0f} ms",
            "from a fact to its round": f"{measured.react_s * 1e3:.0f} ms",
            "from placement to slot": f"{measured.place_s * 1e3:.0f} ms",
            "from assignment to ready": f"{measured.load_s * 1e3:.0f} ms",
            "workers busy while a step trains": f"{measured.busy_training:.2f}",
            "cores": cores,
            **_turn_values(measured.turn_values),
        },
        title="What the log says of the machine",
    )
    emit_table(
        ("", "total s", "step s", "waits s", "staleness", "slots used", "moves"),
        [
            (
                one.what,
                one.wall_s,
                one.step_s,
                one.waited_s,
                one.staleness,
                one.slots_used,
                one.moves,
            )
            for one in answers
        ],
        title="From the last worker's join to the last commit",
    )
    emit_line(f"error of the reproduction: {error:+.1%}")
    if len(answers) > 2:
        ratio = answers[2].wall_s / answers[1].wall_s
        emit_line(f"the run would take {ratio:.2f} of the time it takes as it was, simulated both")
    if measured.turn_values is not None:
        emit_line(
            "not in the model: values of turns, whose tokens take slots and make the others "
            "slower; half of the share, or of the samples, is half of their tokens"
        )
    if measured.commands or measured.rejoined:
        emit_line(
            f"not in the model: {measured.commands} user commands, "
            f"{measured.rejoined} workers that came back"
        )


def _turn_values(cost: TurnValues | None) -> dict[str, str]:
    """Tokens that the engines sampled beside the responses."""
    if cost is None:
        return {}
    return {
        "values of turns": (
            f"{cost.tokens:,} tokens, {cost.tokens / max(1, cost.trained):.2f} for each that was "
            f"trained (share {cost.share:g}, {cost.samples} samples)"
        )
    }

"""`dora-pipe sim scale`: thousands of accelerators, on paper and in simulation.

Its options are the fields of `Size`, with their defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dora_pipe.bench.study_commands import emit_tables
from dora_pipe.core.console import say
from dora_pipe.core.errors import UsageError

if TYPE_CHECKING:
    from dora_pipe.bench.scale.size import Size

OPTIONS: Final[Mapping[str, int | float]] = {
    "workers": 512,
    "gpus_per_worker": 8,
    "requests": 100_000,
    "slots": 64,
    "group_size": 16,
    "max_staleness": 2,
    "in_flight_batches": 3.0,
    "max_tokens": 65_536,
    "prompt_tokens": 2048,
    "turn_tokens": 2048,
    "answer_tokens": 256,
    "answer_s": 10.0,
    "trainer_gpus": 2048,
    "checkpoint_tokens": 128,
    "failures_gpu_day": 419 / 54 / 16_384,
    "changed_share": 0.03,
    "store_gb_s": 100.0,
    "link_gb_s": 50.0,
    "disk_gb_s": 20.0,
    "gpu_gb_s": 25.0,
    "accelerator_gb": 192.0,
    "threads": 4,
    "whole_every": 16,
    "keep_days": 7.0,
    "steps": 4,
    "failures": 6,
}
"""The fields of `Size` and their defaults, for a help that imports nothing; a test compares."""


def size_of(given: dict[str, Any], *, quick: bool) -> Size:
    """What was asked for. Raises UsageError."""
    from dora_pipe.bench.scale.size import QUICK, Size

    changed = {name: value for name, value in given.items() if value != OPTIONS[name]}
    size = Size(**{**(QUICK if quick else {}), **changed})
    for name in OPTIONS:
        if getattr(size, name) <= 0 and name != "failures":
            raise UsageError(f"--{name.replace('_', '-')} must be above 0")
    if not 1 < size.in_flight_batches <= size.max_staleness + 1:
        raise UsageError("--in-flight-batches must be above 1 and at most --max-staleness and 1")
    if size.requests < size.workers * size.group_size:
        raise UsageError("--requests: less than a group a worker", hint="fewer --workers")
    return size


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each of OPTIONS, as typer reads them."""
    own = inspect.signature(command, eval_str=True).parameters
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[type(default), typer.Option(help="See docs/scale.md.")],
        )
        for name, default in OPTIONS.items()
    ]
    every = [*(one for one in own.values() if one.name != "given"), *options]
    command.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in every}
    return command


@_with_options
def scale(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Sixteen workers, as full, in seconds.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs; the last is counted.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    **given: Any,
) -> None:
    """What a run of 512 workers of 8 accelerators costs this pipeline, and what breaks first."""
    from dora_pipe.bench.scale.tables import measure, tables

    size = size_of(given, quick=quick)
    emit_tables(tables(measure(size, seeds, say)), as_json=as_json)

"""`dora-pipe sim scale`: thousands of accelerators, on paper and in simulation.

Its options are the fields of `Size`, with their defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Final

import typer

from dora_pipe.bench.scale.size import QUICK, Size
from dora_pipe.bench.scale.tables import measure, tables
from dora_pipe.bench.study_commands import emit_tables
from dora_pipe.core.console import say
from dora_pipe.core.errors import UsageError

_TYPES: Final[dict[Any, type]] = {"int": int, "float": float}


def size_of(given: dict[str, Any], *, quick: bool) -> Size:
    """What was asked for. Raises UsageError."""
    defaults = {one.name: one.default for one in fields(Size)}
    changed = {name: value for name, value in given.items() if value != defaults[name]}
    size = Size(**{**(QUICK if quick else {}), **changed})
    for name in defaults:
        if getattr(size, name) <= 0 and name != "failures":
            raise UsageError(f"--{name.replace('_', '-')} must be above 0")
    if not 1 < size.in_flight_batches <= size.max_staleness + 1:
        raise UsageError("--in-flight-batches must be above 1 and at most --max-staleness and 1")
    if size.requests < size.workers * size.group_size:
        raise UsageError("--requests: less than a group a worker", hint="fewer --workers")
    return size


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of `Size`, as typer reads them."""
    own = inspect.signature(command, eval_str=True).parameters
    options = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=one.default,
            annotation=Annotated[_TYPES[one.type], typer.Option(help="See docs/scale.md.")],
        )
        for one in fields(Size)
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
    size = size_of(given, quick=quick)
    emit_tables(tables(measure(size, seeds, say)), as_json=as_json)

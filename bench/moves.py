"""Measures what a moved request costs with its KV cache, and without: prefilled; decides nothing.

Two processes, an engine each, the own one or vLLM, one thread each. The source has a running
request of so many tokens and lets it go; the target takes it up; both ways end with the target's
next token, so that a row says how much sooner it comes. The cache goes as between workers: `files`,
a directory that both share, or `flight`, over the wire from a directory that the target does not
see. What a run adds is the round trip through its log (`moves_log`). Models are random. Every
figure is a median, by wall clock; `moved_ms` is measured from end to end, over both processes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from dora_pipe.bench.moves_child import (
    RUNNING_TOKENS,
    TOKENS_MAX,
    Answer,
    Ask,
    LetGo,
    Prefill,
    Run,
    Setup,
    TakeUp,
)
from dora_pipe.bench.moves_engine import (
    TORCH,
    VLLM,
    check_known,
    rounding_of,
    write_model,
)
from dora_pipe.bench.processes import end
from dora_pipe.bench.qwen3 import SHAPES
from dora_pipe.core.errors import ResourceError, UsageError

TOKENS: Final = {"demo": (30, 120, 250), "llama-25m": (1000, 2000, 4000)} | dict.fromkeys(
    SHAPES, (1000, 4000)
)
REPEATS: Final = 5
PREFILLS: Final = 3
WAYS: Final = ("files", "flight")

_CHILD: Final = "dora_pipe.bench.moves_child"
_ANSWER: Final = msgspec.json.Decoder(Answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFigure:
    """One length of sequence, moved in one way.

    `export_ms` and `put_ms` are the source's, `fetch_ms` and `import_ms` the target's; `import_ms`
    and `prefill_ms` end with the request's next token. `moved_ms` is from the source's first step
    to the target's next token. `ratio` is `prefill_ms / moved_ms`.

    Example: ``MoveFigure(model="llama-25m", way="files", tokens=1000, bytes=16_384_512,
    export_ms=4.1, put_ms=31.0, fetch_ms=12.2, import_ms=12.9, moved_ms=61.2, prefill_ms=700.0,
    ratio=11.6)``
    """

    model: str
    way: str
    tokens: int
    bytes: int
    export_ms: float
    put_ms: float
    fetch_ms: float
    import_ms: float
    moved_ms: float
    prefill_ms: float
    ratio: float


def bench_moves(
    folder: Path, models: Sequence[str], tokens: Sequence[int] = (), *, engine: str = TORCH
) -> Iterator[MoveFigure]:
    """Figures for each length and way; files go below `folder`. Needs torch. Raises UsageError."""
    for name in models:
        check_known(engine, name)
        yield from move_figures(folder, name, tokens or TOKENS[name], engine=engine)


def move_figures(
    folder: Path,
    model: str,
    lengths: Sequence[int],
    *,
    engine: str = TORCH,
    ways: Sequence[str] = WAYS,
    repeats: int = REPEATS,
    prefills: int = PREFILLS,
) -> Iterator[MoveFigure]:
    """Figures for each length of sequence and each way. Raises UsageError, ResourceError."""
    if not all(RUNNING_TOKENS < tokens <= TOKENS_MAX for tokens in lengths):
        raise UsageError(f"a sequence has {RUNNING_TOKENS + 1} to {TOKENS_MAX} tokens")
    setup = Setup(
        engine=engine,
        model=model,
        directory=str(folder / model),
        context_tokens=max(lengths) + 64,
        shared=str(folder),
        own="",
    )
    if engine == VLLM:
        write_model(Path(setup.directory), model)
    with ExitStack() as stack:
        source, target = (
            stack.enter_context(Child(msgspec.structs.replace(setup, own=str(folder / own))))
            for own in ("source", "target")
        )
        for tokens in lengths:
            source.ask(Run(tokens=tokens))
            first = source.ask(LetGo(way=ways[0]))
            prefilled = [target.ask(Prefill(request=first)) for _ in range(prefills)]
            prefill_ms = statistics.median(one.prefill_ms for one in prefilled)
            for way in ways:
                yield _figure(source, target, model, way, repeats, prefilled[0], prefill_ms)


def _figure(
    source: Child,
    target: Child,
    model: str,
    way: str,
    repeats: int,
    prefilled: Answer,
    prefill_ms: float,
) -> MoveFigure:
    _moved(source, target, way)  # the first of its size takes its memory
    rounds = [_moved(source, target, way) for _ in range(repeats)]
    for one in rounds:
        _check_same(one.next_token, prefilled.next_token, rounding_of(model))
    spent = {
        name: statistics.median(float(getattr(one, name)) for one in rounds)
        for name in ("export_ms", "put_ms", "fetch_ms", "import_ms")
    }
    moved_ms = statistics.median((one.ended_ns - one.began_ns) / 1e6 for one in rounds)
    return MoveFigure(
        model=model,
        way=way,
        tokens=len(rounds[0].token_ids),
        bytes=rounds[0].bytes,
        moved_ms=round(moved_ms, 2),
        prefill_ms=round(prefill_ms, 2),
        ratio=round(prefill_ms / moved_ms, 2),
        **{name: round(value, 2) for name, value in spent.items()},
    )


def _check_same(moved: tuple[int, float], prefilled: tuple[int, float], rounding: float) -> None:
    """Raise ResourceError unless both ways have drawn the same, up to an engine's rounding."""
    if moved[0] != prefilled[0] or abs(moved[1] - prefilled[1]) > rounding:
        raise ResourceError(f"moved, the next token is {moved}; prefilled, {prefilled}")


def _moved(source: Child, target: Child, way: str) -> Answer:
    """One move there; the source can then do it again."""
    return target.ask(TakeUp(way=way, request=source.ask(LetGo(way=way))))


class Child:
    """A process with an engine, from the outside; leaving its `with` ends it."""

    def __init__(self, setup: Setup) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", _CHILD, msgspec.json.encode(setup).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, what: Ask) -> Answer:
        """Do that; what came of it. Raises ResourceError when the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(what) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the line below is empty
        line = self._process.stdout.readline()
        if not line:
            raise ResourceError("a process of the bench has ended", hint="it said why above")
        return _ANSWER.decode(line)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end(self._process, at_once=kind is not None)

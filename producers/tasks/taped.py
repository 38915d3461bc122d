"""Functions of an agent that the cassette of its run answers: `taped`.

They ask the tape of the task process in which the agent runs, or that of the process that has
started this one (`tape_client`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import msgspec

from dora_pipe.producers.tasks.cassette import tool_call
from dora_pipe.producers.tasks.tape import TAPE, Begun, is_answer, raise_recorded, raised
from dora_pipe.producers.tasks.tape_client import TapeCall, client_here
from dora_pipe.producers.tasks.tape_door import cassette_variables

__all__ = ["cassette_variables", "taped"]

_ASKING: ContextVar[bool] = ContextVar("a marked function runs", default=False)
"""What it calls is its answer's business: an answered call makes none of those."""

P = ParamSpec("P")
R = TypeVar("R")


def taped(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that an agent calls, so that the cassette of its run answers it.

    Its arguments and what it returns are values of JSON, and it returns them as plain ones, also
    where there is no cassette. What it raises is recorded, and raised again as `RaisedThere`. A
    call stands behind all that its agent has begun before: agents that call from several threads
    or processes at once have no order that a cassette could know. Marked functions that a marked
    one calls are a part of it.

    Example::

        @taped
        async def search(query: str) -> list[str]: ...
    """
    signature = inspect.signature(function)

    def begun(args: Any, kwargs: Any) -> _FunctionCall:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = msgspec.to_builtins(bound.arguments)
        return _FunctionCall(_begun(function.__name__, arguments))

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waits(*args: Any, **kwargs: Any) -> Any:
            with begun(args, kwargs) as call:
                if call.found is None:
                    with _real():
                        call.answer(await function(*args, **kwargs))
            return call.value

        return cast(Callable[P, R], waits)

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with begun(args, kwargs) as call:
            if call.found is None:
                with _real():
                    call.answer(function(*args, **kwargs))
        return call.value

    return cast(Callable[P, R], plain)


@contextmanager
def _real() -> Iterator[None]:
    before = _ASKING.set(True)
    try:
        yield
    finally:
        _ASKING.reset(before)


def _begun(name: str, arguments: dict[str, Any]) -> Begun | TapeCall | None:
    """A call of the tape that there is here; None: of none. Raises CassetteMiss, ResourceError."""
    if _ASKING.get():
        return None
    tape = TAPE.get()
    if tape is not None:
        return tape.begin(tool_call(name, arguments))
    client = client_here()
    return None if client is None else client.begin(name, arguments)


class _FunctionCall:
    """A call of a function that is marked; of no tape it is made as it is."""

    def __init__(self, begun: Begun | TapeCall | None) -> None:
        self._begun = begun
        self.found = None if begun is None else begun.found
        self.value: Any = None

    def __enter__(self) -> _FunctionCall:
        if self.found is not None:
            raise_recorded(self.found)
            self.value = self.found.get("value")
        return self

    def answer(self, value: Any) -> None:
        self.value = msgspec.json.decode(msgspec.json.encode(value))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._begun is None or self.found is not None:
            return
        if error is None:
            self._begun.answered({"value": self.value})
        elif is_answer(error):
            self._begun.answered(raised(error))
        elif isinstance(self._begun, TapeCall):
            self._begun.close()

"""Functions of an agent that the cassette of its run answers: `taped`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import msgspec

from dora_pipe.producers.tasks.cassette import Answer, Call, tool_call
from dora_pipe.producers.tasks.tape import TAPE, Asking, EpisodeTape, raise_recorded

P = ParamSpec("P")
R = TypeVar("R")


def taped(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that an agent calls, so that the cassette of its run answers it.

    Its arguments and what it returns are values of JSON, and it returns them as plain ones, also
    where there is no cassette. What it raises is recorded, and raised again as `RaisedThere`. A
    call stands behind all that its agent has begun before: agents that call from several threads
    at once have no order that a cassette could know.

    Example::

        @taped
        async def search(query: str) -> list[str]: ...
    """
    signature = inspect.signature(function)

    def begun(args: Any, kwargs: Any) -> _FunctionCall:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = msgspec.to_builtins(bound.arguments)
        return _FunctionCall(TAPE.get(), tool_call(function.__name__, arguments))

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def waits(*args: Any, **kwargs: Any) -> Any:
            with begun(args, kwargs) as call:
                if call.found is None:
                    call.answer(await function(*args, **kwargs))
            return call.value

        return cast(Callable[P, R], waits)

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with begun(args, kwargs) as call:
            if call.found is None:
                call.answer(function(*args, **kwargs))
        return call.value

    return cast(Callable[P, R], plain)


class _FunctionCall:
    """A call of a function that is marked; of no tape it is made as it is."""

    def __init__(self, tape: EpisodeTape | None, call: Call) -> None:
        self.found: Answer | None = None
        self.value: Any = None
        self._asking: Asking | None = None
        if tape is not None:
            asked = tape.ask(call)
            tape.add(call)
            self.found = tape.find(asked)
            self._asking = None if self.found is not None else tape.asking(asked)

    def __enter__(self) -> _FunctionCall:
        if self.found is not None:
            raise_recorded(self.found)
            self.value = self.found.get("value")
        return self

    def answer(self, value: Any) -> None:
        """What the function has returned."""
        self.value = msgspec.json.decode(msgspec.json.encode(value))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._asking is not None:
            self._asking.__exit__(kind, error, trace)
            if error is None:
                self._asking.answered({"value": self.value})

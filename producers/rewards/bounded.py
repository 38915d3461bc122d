"""Evaluation of untrusted patterns, expressions and schemas in a helper process.

The kernel kills the helper after `CPU_S` processor seconds (independent of load) or beyond
`MEMORY_BYTES`; the caller gets None, and the next question a new helper.

    python -m dora_pipe.producers.rewards.bounded    started by `Helper`
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import msgspec

CPU_S: Final = 3.0
"""Processor seconds of one question; 1 in 1000 of math-verify's hardest honest comparisons takes
1 s."""

MEMORY_BYTES: Final = 2 << 30

BY_LIMITS: Final = (signal.SIGPROF, signal.SIGKILL, signal.SIGSEGV)
"""Signals that mean a limit: time, memory, stack."""

END_S: Final = 1.0

CHARACTERS_MAX: Final = 200_000
"""Characters kept from the end of a text."""


_MODULE: Final = "dora_pipe.producers.rewards.bounded"


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Question with the arguments of its function (`QUESTIONS`)."""

    what: str
    about: dict[str, Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Result of a question: `value` is None if a limit ended it; `error` describes a wrong
    question."""

    value: Any = None
    error: str = ""


class WrongQuestion(ValueError):
    """Invalid pattern, gold answer or schema, independent of the model's text."""


class Helper:
    """Helper process, started by the first question."""

    def __init__(self, cpu_s: float = CPU_S) -> None:
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, what: str, **about: Any) -> Any:
        """Return the answer, or None beyond the limits. Raises WrongQuestion, and
        ChildProcessError if the helper dies otherwise."""
        about = {key: _end_of(value) for key, value in about.items()}
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(Question(what, about)) + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                status = self._end()
                if -status in BY_LIMITS:
                    return None
                raise ChildProcessError(f"the helper of rewards ended with status {status}")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise WrongQuestion(answer.error)
        return answer.value

    def close(self) -> None:
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            atexit.register(self.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(self._cpu_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._process

    def _end(self) -> int:
        atexit.unregister(self.close)
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # A live helper exits at the end of input.
        try:
            return process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


HELPER: Final = Helper()


def _end_of(value: Any) -> Any:
    return value[-CHARACTERS_MAX:] if isinstance(value, str) else value


# Child side: questions.


def search(pattern: str, group: str, text: str) -> str | bool:
    """Return the group of the last match; without a group, whether there is a match."""
    if not group:
        return re.search(pattern, text) is not None
    held = ""
    for match in re.finditer(pattern, text):
        held = match[int(group) if group.isdecimal() else group] or ""
    return held


def equal(gold: str, answer: str) -> list[Any]:
    """Return whether the answer parses, whether it equals the gold answer, and its normal form."""
    from math_verify import parse, verify

    expected = _gold(gold)
    if not expected:
        raise WrongQuestion(f"the row's answer is not an expression: {gold[:100]!r}")
    parsed = parse(answer, parsing_timeout=None)
    if not parsed:
        return [False, False, ""]
    same = verify(expected, parsed, **_VERIFY)
    return [True, same, _written(expected if same else parsed)]


def _written(expressions: list[Any]) -> str:
    first = expressions[0]
    try:
        return str(Fraction(str(first)) if getattr(first, "is_Float", False) else first)
    except ValueError:  # More digits than Python prints.
        return ""


@lru_cache(maxsize=1024)
def _gold(gold: str) -> list[Any]:
    """Parse a row's answer; bare answers are read as LaTeX first."""
    from math_verify import parse

    last = gold.rpartition("####")[2].strip()  # GSM8K puts the answer after ####.
    if re.fullmatch(r"[-+]?\d+(\.\d+)?[eE][-+]?\d{1,2}", last):
        last = f"{Decimal(last):f}"
    marked = any(mark in last for mark in ("$", "\\(", "\\[", "\\boxed"))
    bare = [] if marked else parse(f"${last}$", parsing_timeout=None)
    return bare or parse(last, parsing_timeout=None)


def conforms(schema: dict[str, Any], text: str) -> list[Any]:
    """Return whether the text is JSON, whether it matches the schema, and the JSON with sorted
    keys."""
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise WrongQuestion(f"the schema is invalid: {error.message}") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return [False, False, ""]
    try:
        # An empty registry: references are never fetched.
        valid = kind(schema, registry=Registry()).is_valid(value)
        return [True, valid, json.dumps(value, sort_keys=True, separators=(",", ":"))]
    except Unresolvable as error:
        raise WrongQuestion(f"the schema has an unresolved reference: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_VERIFY: Final[Mapping[str, Any]] = {"timeout_seconds": None, "allow_set_relation_comp": True}
"""The kernel limits the time; `x <= 3` is an interval."""

QUESTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "search": search,
    "equal": equal,
    "conforms": conforms,
}


def main() -> None:
    """Answer questions until the pipe ends; the argument is the limit in seconds."""
    cpu_s = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # Terminates the process at any point.
    ready: set[str] = set()
    for line in sys.stdin.buffer:
        question = msgspec.json.decode(line, type=Question)
        if question.what not in ready:
            ready.add(question.what)
            _prepare(question.what)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = _answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _prepare(what: str) -> None:
    """Import libraries outside the time limit and silence them."""
    import logging

    logging.disable()
    if what == "equal":
        equal("1/2", "0.5")
    elif what == "conforms":
        conforms({}, "1")


def _answer(question: Question) -> Answer:
    try:
        return Answer(QUESTIONS[question.what](**question.about))
    except WrongQuestion as error:
        return Answer(error=str(error))
    except (MemoryError, RecursionError):
        return Answer()


if __name__ == "__main__":
    main()

"""Questions about a model's text that may take for ever, asked of a helper process with limits.

A pattern that tries every way to match, an expression of astronomic size, a nested document: what
answers them cannot be interrupted where it stands, so it stands in a process that the kernel ends
after `CPU_S` seconds of computing or beyond `MEMORY_BYTES`. Time is that of the processor, so that
a busy machine decides as an idle one does. The caller gets None in place of an answer, and the next
question a fresh helper.

    python -m dora_pipe.producers.rewards.bounded      started by `Helper`, of no use by hand
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
"""Of one question. Of math-verify's hardest honest comparisons one in a thousand takes a second."""

MEMORY_BYTES: Final = 2 << 30
"""Of address space, libraries included."""

BY_LIMITS: Final = (signal.SIGPROF, signal.SIGKILL, signal.SIGSEGV)
"""What ends it: time, the machine's memory, the stack's."""

END_S: Final = 1.0
"""How long it may take to go by itself."""

CHARACTERS_MAX: Final = 200_000
"""Of a text: what is before its last so many is not looked at."""


_MODULE: Final = "dora_pipe.producers.rewards.bounded"


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Example: ``Question("search", {"pattern": "[0-9]+", "group": "", "text": "42"})``."""

    what: str
    about: dict[str, Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """`value` is None where a limit was in the way; `error` is what the question did wrong."""

    value: Any = None
    error: str = ""


class WrongQuestion(ValueError):
    """It is not the model's text that cannot be judged, but what it is held against."""


class Helper:
    """The helper process of this one; it starts with the first question.

    Example: ``HELPER.ask("search", pattern="a+", group="", text="caat") == "aa"``
    """

    def __init__(self, cpu_s: float = CPU_S) -> None:
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, what: str, **about: Any) -> Any:
        """The answer; None where it would take more than the limits.

        Raises WrongQuestion for a schema that is none, an answer in the data that is no expression;
        ChildProcessError where the helper ends by no limit.
        """
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
        """End the process."""
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
        """Its status, of its exit or -signal."""
        atexit.unregister(self.close)
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # Where it lives, it reads the end, and goes.
        try:
            return process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


HELPER: Final = Helper()


def _end_of(value: Any) -> Any:
    return value[-CHARACTERS_MAX:] if isinstance(value, str) else value


# In the helper: the questions.


def search(pattern: str, group: str, text: str) -> str | bool:
    """What the group of the last match holds; without a group, whether there is a match."""
    if not group:
        return re.search(pattern, text) is not None
    held = ""
    for match in re.finditer(pattern, text):
        held = match[int(group) if group.isdecimal() else group] or ""
    return held


def equal(gold: str, answer: str) -> list[Any]:
    """Whether the answer can be read as an expression, whether it is the gold one's equal, and what
    it reads: all equals of the gold one as that, another as the library writes it."""
    from math_verify import parse, verify

    wanted = _gold(gold)
    if not wanted:
        raise WrongQuestion(f"the row's answer is no expression: {gold[:100]!r}")
    found = parse(answer, parsing_timeout=None)
    if not found:
        return [False, False, ""]
    same = verify(wanted, found, **_VERIFY)
    return [True, same, _written(wanted if same else found)]


def _written(expressions: list[Any]) -> str:
    """Whole numbers and fractions alike: 0.50 is 1/2. Empty where it cannot be written down."""
    first = expressions[0]
    try:
        return str(Fraction(str(first)) if getattr(first, "is_Float", False) else first)
    except ValueError:  # More digits than Python writes.
        return ""


@lru_cache(maxsize=1024)
def _gold(gold: str) -> list[Any]:
    """A row's answer as expressions. It may be bare: then it is read as LaTeX first."""
    from math_verify import parse

    last = gold.rpartition("####")[2].strip()  # GSM8K's answers end so, behind their way.
    if re.fullmatch(r"[-+]?\d+(\.\d+)?[eE][-+]?\d{1,2}", last):
        last = f"{Decimal(last):f}"
    marked = any(mark in last for mark in ("$", "\\(", "\\[", "\\boxed"))
    bare = [] if marked else parse(f"${last}$", parsing_timeout=None)
    return bare or parse(last, parsing_timeout=None)


def conforms(schema: dict[str, Any], text: str) -> list[Any]:
    """Whether the text is JSON, whether that is what the schema describes, and the JSON with its
    keys in order."""
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise WrongQuestion(f"the schema is none: {error.message}") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return [False, False, ""]
    try:
        # An empty registry: nothing is fetched from where a schema refers to.
        valid = kind(schema, registry=Registry()).is_valid(value)
        return [True, valid, json.dumps(value, sort_keys=True, separators=(",", ":"))]
    except Unresolvable as error:
        raise WrongQuestion(f"the schema refers to what is not in it: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_VERIFY: Final[Mapping[str, Any]] = {"timeout_seconds": None, "allow_set_relation_comp": True}
"""Time is the kernel's to limit; `x <= 3` is the interval."""

QUESTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "search": search,
    "equal": equal,
    "conforms": conforms,
}


def main() -> None:
    """Answer until the pipe ends; the word behind the module is the seconds of a question."""
    cpu_s = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # Ends the process, wherever it stands.
    known: set[str] = set()
    for line in sys.stdin.buffer:
        question = msgspec.json.decode(line, type=Question)
        if question.what not in known:
            known.add(question.what)
            _prepare(question.what)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = _answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _prepare(what: str) -> None:
    """Imports do not count as time of a question; libraries say nothing of every text."""
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

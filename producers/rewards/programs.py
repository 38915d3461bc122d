"""Reward `code`: runs a row's tests on the program in the text, in `sandbox`.

The program is the last fenced block, or the entire text. Python tests share its process, so a
hostile program can cheat.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.rewards.arguments import Function, Options, RewardContext
from dora_pipe.producers.rewards.sandbox import Ended, Order, Program
from dora_pipe.producers.rewards.texts import last_block
from dora_pipe.producers.tasks.task import Retry, Reward, Row

SANDBOX: Final = Path(__file__).with_name("sandbox.py")

BESIDE_S: Final = 1.0
"""Seconds to start and stop on a busy machine, in addition to the programs."""

TESTS_MAX: Final = 1000

MEBIBYTE: Final = 1 << 20

_HARNESS: Final = """
import json, os, sys

def main():
    order = json.load(sys.stdin)
    pipe = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    names = {"__name__": "answer"}
    exec(compile(order["answer"], "answer.py", "exec"), names)
    for place, test in enumerate(order["tests"]):
        try:
            exec(compile(test, f"test {place}", "exec"), names)
        except BaseException:
            continue
        os.write(pipe, f"{order['token']} {place}\\n".encode())

main()
"""
"""Harness of Python tests: prints a secret word for each passed test."""


class Expected(msgspec.Struct, frozen=True):
    """Input and expected output of a program."""

    input: str
    output: str


Limit = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


class Code(Options, frozen=True, kw_only=True):
    """Score of a program by the row's tests. Part `passed`: the share that passed.

    Tests are Python (`assert add(1, 2) == 3`, text or list), or inputs and outputs (a list of
    `{input, output}`, or `{inputs = [...], outputs = [...]}`), also as JSON text.
    """

    column: str = "tests"
    """Column with the tests."""
    share: bool = False
    """Score with the share of passed tests instead of all or nothing."""
    wall_s: Limit = 6.0
    """Seconds for all tests of a text."""
    cpu_s: Count = 4
    memory_mb: Count = 512
    """Address space of each process, in MB."""
    file_mb: Count = 16
    """Limit of one file and of the output, in MB; all files together get 4 times that."""
    processes: Count = 16
    concurrency: Count = 4
    """Programs that run concurrently in one task process."""
    isolation: Literal["required", "none"] = "required"
    """`required`: programs run in kernel namespaces, or the start fails. `none`: programs see
    the files and network of the worker's user."""

    def open(self, where: str, context: RewardContext) -> Function:
        """Return the function; see Options. Runs a program to test the machine's isolation."""
        if self.wall_s + BESIDE_S > context.limit_s:
            raise ConfigError(
                f"{where}: wall_s is {self.wall_s:g}, and task.reward_timeout_s"
                f" {context.limit_s:g}",
                hint=f"task.reward_timeout_s must exceed wall_s by {BESIDE_S:g} s",
            )
        return Programs(self, where, context).score


class Programs:
    """Runner of programs with bounded concurrency, one per task process."""

    def __init__(self, options: Code, where: str, context: RewardContext) -> None:
        """Raises ConfigError if isolation is required but unavailable, TaskError if no program
        runs at all."""
        self._options = options
        self._patience_s = context.limit_s - options.wall_s - BESIDE_S
        self._room = asyncio.Semaphore(options.concurrency)
        self._isolate = options.isolation == "required"
        if self._runs(isolate=self._isolate):
            return
        if not self._isolate or not self._runs(isolate=False):
            raise TaskError(f"{where}: programs cannot run here")
        raise ConfigError(
            f"{where}: programs cannot be isolated: this kernel denies user namespaces",
            hint='its option isolation = "none" runs code of the model with access to your'
            " files and network",
        )

    async def score(self, row: Row, text: str) -> Reward:
        """Score the program of a text. Raises ValueError for invalid tests, Retry if resources
        are short."""
        tests = read_tests(row[self._options.column])
        program = last_block(text)
        if isinstance(tests[0], Expected):
            pairs = [test for test in tests if isinstance(test, Expected)]
            passed = await self._printed(program, pairs)
        else:
            passed = await self._asserted(program, [str(test) for test in tests])
        share = passed / len(tests)
        value = share if self._options.share else float(passed == len(tests))
        return Reward(value=value, parts={"passed": share})

    async def _asserted(self, program: str, tests: Sequence[str]) -> int:
        token = secrets.token_hex(16)
        message = {"answer": program, "tests": tests, "token": token}
        run = Program(arguments=["-c", _HARNESS], stdin=msgspec.json.encode(message).decode())
        ended = await self._ended(self._order([run], {}, isolate=self._isolate))
        lines = {line for result in ended for line in result["output"].split("\n")}
        return sum(f"{token} {index}" in lines for index in range(len(tests)))

    async def _printed(self, program: str, tests: Sequence[Expected]) -> int:
        runs = [Program(arguments=["answer.py"], stdin=test.input) for test in tests]
        ended = await self._ended(self._order(runs, {"answer.py": program}, isolate=self._isolate))
        return sum(
            result["status"] == 0 and _lines(result["output"]) == _lines(test.output)
            for test, result in zip(tests, ended, strict=False)
        )

    def _order(self, runs: list[Program], files: dict[str, str], *, isolate: bool) -> Order:
        limits = self._options
        return Order(
            runs=runs,
            files=files,
            isolate=isolate,
            stop=not limits.share,
            wall_s=limits.wall_s,
            cpu_s=limits.cpu_s,
            memory_bytes=limits.memory_mb * MEBIBYTE,
            file_bytes=limits.file_mb * MEBIBYTE,
            processes=limits.processes,
        )

    async def _ended(self, order: Order) -> list[Ended]:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._room.acquire()
        except TimeoutError:
            raise Retry(f"{self._options.concurrency} programs run already (concurrency)") from None
        try:
            ended = await self._run(order)
        finally:
            self._room.release()
        if order["isolate"] and not ended[0]["isolated"]:
            raise Retry("the kernel denied a namespace")
        return ended

    async def _run(self, order: Order) -> list[Ended]:
        directory = tempfile.mkdtemp(prefix="dora-pipe-code-")
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(directory), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            try:
                output, _ = await process.communicate(msgspec.json.encode(order))
            finally:
                if process.returncode is None:
                    process.terminate()  # It kills its programs, then exits.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), BESIDE_S)
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return _read(output, process.returncode)

    def _runs(self, *, isolate: bool) -> bool:
        directory = tempfile.mkdtemp(prefix="dora-pipe-code-")
        try:
            order = self._order([Program(arguments=["-c", ""], stdin="")], {}, isolate=isolate)
            done = subprocess.run(
                _command(directory), input=msgspec.json.encode(order), capture_output=True
            )
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return _read(done.stdout, done.returncode)[0]["status"] == 0


def _command(directory: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(SANDBOX), str(os.getpid()), directory]


def _read(output: bytes, status: int | None) -> list[Ended]:
    """Parse the sandbox's output. Raises Retry if it is incomplete, which is the machine's
    fault."""
    try:
        return msgspec.json.decode(output, type=list[Ended])
    except msgspec.DecodeError:
        raise Retry(f"the program runner ended with status {status}") from None


def read_tests(value: Any) -> list[str | Expected]:
    """Return the tests of a row from any of their forms. Raises ValueError."""
    tests = _tests(value)
    if not tests or len(tests) > TESTS_MAX:
        raise ValueError(f"a row has {len(tests)} tests, expected 1 to {TESTS_MAX}")
    return tests


def _tests(value: Any) -> list[str | Expected]:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return [value]  # Python may also start this way.
    match value:
        case str():
            return [value]
        case {"fn_name": str(name)}:
            raise ValueError(f"tests call `{name}` with values; write the tests in Python")
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            pairs = zip(inputs, outputs, strict=True)
            return [Expected(_text(stdin), _text(stdout)) for stdin, stdout in pairs]
        case [*items]:
            return [_test(test) for test in items]
    raise ValueError(f"tests are {type(value).__name__}: expected Python or input and output")


def _test(value: Any) -> str | Expected:
    match value:
        case str():
            return value
        case {"input": stdin, "output": stdout}:
            return Expected(_text(stdin), _text(stdout))
    raise ValueError("a test is neither a text of Python nor a table with `input` and `output`")


def _text(value: Any) -> str:
    lines = value if isinstance(value, list) else [value]
    for line in lines:
        if isinstance(line, bool) or not isinstance(line, str | int | float):
            raise ValueError(f"a test reads or prints {type(line).__name__}: write it as text")
    return "\n".join(map(str, lines))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]

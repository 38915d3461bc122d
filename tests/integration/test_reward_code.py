"""The reward `code`: right programs pass, and what is wrong, endless, greedy or hostile does not,
and is gone afterwards.

Method: programs that try what a sandbox is there for, with namespaces (where this machine gives
them) and without.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.rewards import programs
from dora_pipe.producers.rewards.arguments import RewardContext
from dora_pipe.producers.rewards.programs import read_tests
from dora_pipe.producers.rewards.registry import Rewards
from dora_pipe.producers.tasks.calls import Rewarded
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.task import Completion, Retry, Reward
from tests.support import task_pool

ADD = "```python\ndef add(a, b):\n    return a + b\n```"
ASSERTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add('a', 'b') == 'ab'"]
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5", "output": "9"}]
SUM = "print(sum(map(int, input().split())))"
MARK = "dora_pipe_test_of_code"
"""In the command line of what a program leaves behind."""


async def _score(text: str, tests: Any, **options: Any) -> Reward:
    options = {**_isolation(_isolates()), **options}
    rewards = Rewards([model.RewardUse(use="code", options=options)])
    score = await rewards.score({"tests": tests}, Completion(text=text))  # type: ignore[misc]
    assert isinstance(score, Reward)
    return score


def score(text: str, tests: Any, **options: Any) -> Reward:
    return asyncio.run(_score(text, tests, **options))


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        (ADD, ASSERTS),
        (f"First a try:\n```\nno\n```\nThen:\n{ADD}\nDone.", "\n".join(ASSERTS)),
        ("def add(a, b): return a + b", msgspec.json.encode(ASSERTS).decode()),
        (SUM, PAIRS),
        (SUM, {"inputs": ["1 2", ["3 4", "5"]], "outputs": ["3", ["7"]]}),
        ("import numpy\ndef add(a, b): return a + b", ASSERTS),
    ],
)
def test_a_right_program_passes(text: str, tests: Any) -> None:
    assert score(text, tests) == Reward(value=1.0, raw=1.0, parts={"code": 1.0, "code.passed": 1.0})


@pytest.mark.parametrize(
    ("text", "tests", "passed"),
    [
        ("def add(a, b): return a - b", ASSERTS, 1 / 3),
        ("def add(a, b): return int(a) + int(b)", ASSERTS, 2 / 3),
        ("def add(a, b: return", ASSERTS, 0.0),
        ("", ASSERTS, 0.0),
        ("print(3)", PAIRS, 1 / 2),
        ("print(3); exit(1)", PAIRS, 0.0),
        ("raise SystemExit(0)", ASSERTS, 0.0),
        ("import os; os._exit(0)", ASSERTS, 0.0),
        ("print('0\\n1\\n2')", ASSERTS, 0.0),
        ("while True: pass", ASSERTS, 0.0),
        ("\x00\uffff", ASSERTS, 0.0),
    ],
)
def test_a_wrong_program_does_not(text: str, tests: Any, passed: float) -> None:
    options = {"cpu_s": 1, "wall_s": 4.0}
    assert score(text, tests, share=True, **options).value == pytest.approx(passed)


def test_a_program_that_passes_some_tests_passes_none_unless_shares_count() -> None:
    assert score("def add(a, b): return a - b", ASSERTS).value == 0.0


HOSTILE = {
    "computes for ever": "while True: pass",
    "sleeps": "import time; time.sleep(600)",
    "fills memory": "x = []\nwhile True: x.append('a' * 1_000_000)",
    "prints 100 MB": "import sys\nfor _ in range(100): sys.stdout.write('a' * 1_000_000)",
    "writes a big file": "f = open('big', 'w')\nwhile True: f.write('a' * 1_000_000)",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
}
LEAVES = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{MARK}"])
    os._exit(0)
time.sleep(0.3)
print(3)
"""

LATE = f"""
import os, sys
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{MARK}"])
"""


@pytest.mark.parametrize("isolate", [True, False], ids=["isolated", "not isolated"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_greedy_program_ends_by_a_limit(name: str, isolate: bool) -> None:
    began = time.monotonic()
    limits = {"wall_s": 3.0, "cpu_s": 1, "memory_mb": 256, "file_mb": 4}
    actual_score = score(HOSTILE[name], PAIRS, **limits, **_isolation(isolate))
    assert actual_score.value == 0.0
    assert time.monotonic() - began < 120.0


@pytest.mark.parametrize("isolate", [True, False], ids=["isolated", "not isolated"])
def test_what_a_program_starts_is_ended_with_it(isolate: bool) -> None:
    assert score(LEAVES, PAIRS[:1], **_isolation(isolate)).value == 1.0
    assert MARK.encode() not in b"".join(_command_lines())


def test_nobody_waits_any_more_and_the_program_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def given_up() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.5):
                await _score(LEAVES + "time.sleep(600)", PAIRS, wall_s=8.0)

    asyncio.run(given_up())
    assert not list(tmp_path.iterdir())
    assert MARK.encode() not in b"".join(_command_lines())


@pytest.fixture(scope="module")
def alone() -> None:
    if not _isolates():
        pytest.skip("the kernel gives no namespaces here")


@pytest.mark.usefixtures("alone")
def test_an_isolated_program_sees_no_network_no_process_and_writes_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f"""
import os, socket
seen = []
try: socket.create_connection(("127.0.0.1", {port}), 1)
except OSError: seen.append("no network")
try: open({str(tmp_path / "there")!r}, "w")
except OSError: seen.append("no file")
try: os.kill({os.getpid()}, 0)
except OSError: seen.append("no process")
if not os.listdir("/proc"): seen.append("no proc")
if "HOME" in os.environ and os.listdir(os.environ["HOME"]) == ["answer.py"]: seen.append("alone")
if "SECRET" not in os.environ: seen.append("no secret")
print(seen)
"""
        expected = ["no network", "no file", "no process", "no proc", "alone", "no secret"]
        os.environ["SECRET"] = "s"
        try:
            actual_score = score(text, [{"input": "", "output": str(expected)}])
        finally:
            del os.environ["SECRET"]
    assert actual_score.value == 1.0
    assert not (tmp_path / "there").exists()


@pytest.mark.usefixtures("alone")
def test_an_isolated_program_cannot_take_its_file_system_back() -> None:
    remount = 32 | 4096
    text = f"import ctypes; print(ctypes.CDLL(None).mount(b'none', b'/', b'', {remount}, b''))"
    assert score(text, [{"input": "", "output": "-1"}]).value == 1.0


def test_nothing_runs_without_isolation_unless_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: Callable[..., bool] = programs.Programs._runs
    monkeypatch.setattr(
        programs.Programs, "_runs", lambda self, isolate: not isolate and runs(self, isolate=False)
    )
    use = model.RewardUse(use="code")
    with pytest.raises(ConfigError, match="this kernel denies user namespaces") as refused:
        Rewards([use]).sources()
    assert refused.value.hint is not None
    assert 'isolation = "none"' in refused.value.hint
    assert score(ADD, ASSERTS, isolation="none").value == 1.0


def test_programs_that_find_no_room_are_asked_again() -> None:
    async def two() -> list[Reward | BaseException]:
        options = {"concurrency": 1, "wall_s": 8.5, "cpu_s": 8}
        rewards = Rewards([model.RewardUse(use="code", options=options)])
        row, completion = (
            {"tests": PAIRS[:1]},
            Completion(text=f"import time; time.sleep(3)\n{SUM}"),
        )
        asked = [rewards.score(row, completion) for _ in range(2)]
        return await asyncio.gather(*asked, return_exceptions=True)  # type: ignore[arg-type]

    first, second = asyncio.run(two())
    assert isinstance(first, Reward)
    assert isinstance(second, Retry)


def test_the_reward_needs_more_time_than_its_programs() -> None:
    with pytest.raises(ConfigError, match=r"wall_s is 10, and task.reward_timeout_s 10"):
        score(ADD, ASSERTS, wall_s=10.0)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "a row has 0 tests"),
        (3, "tests are int"),
        ([{"input": "1"}], "neither a text of Python nor a table"),
        ([{"input": "1", "output": None}], "a test reads or prints NoneType"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "tests call `f`"),
    ],
)
def test_tests_that_are_none_are_named(tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(tests)


@functools.cache
def _isolates() -> bool:
    try:
        programs.Programs(programs.Code(), "", RewardContext())
    except ConfigError:
        return False
    return True


def _isolation(isolate: bool) -> dict[str, Any]:
    return {} if isolate else {"isolation": "none"}


def _command_lines() -> list[bytes]:
    results = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            results.append(path.read_bytes())
    return results


def test_programs_run_beside_each_other_in_a_task_process_and_end_with_it(tmp_path: Path) -> None:
    rows = [{"prompt": "add", "tests": ASSERTS}, {"prompt": "sum", "tests": PAIRS}]
    (tmp_path / "rows.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))
    config = model.Task(kind="dataset", data=str(tmp_path / "rows.jsonl"), reward="code")
    texts = [ADD, "no", ADD, "def add(a, b): return 3"]
    with TaskPool(config) as pool:
        pool.wait()
        for index, text in enumerate(texts):
            pool.submit(task_pool.score(f"r{index}", text))
        results: dict[str, float] = {}
        end = time.monotonic() + 60
        while len(results) < len(texts) and time.monotonic() < end:
            for event in pool.poll(wait_s=0.1):
                assert isinstance(event, Rewarded), event
                results[event.request] = event.reward
        pool.submit(task_pool.score("late", LATE, 1))
        while MARK.encode() not in b"".join(_command_lines()) and time.monotonic() < end:
            pool.poll(wait_s=0.1)
    assert [results[f"r{index}"] for index in range(4)] == [1.0, 0.0, 1.0, 0.0]
    while MARK.encode() in b"".join(_command_lines()) and time.monotonic() < end:
        time.sleep(0.05)
    assert MARK.encode() not in b"".join(_command_lines())

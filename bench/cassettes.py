"""Measures a cassette by its size: opening it, a call that it has, one that it records, memory;
decides nothing.

The cassette has calls of one tool, eight siblings to a row, each with an answer of its own. Beside
it: what the same costs an agent's own process, and a command that stands behind
`dora-pipe cassette call`.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.producers.tasks.cassette import Recorded, row_digest, tool_call
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.tape import Cassette, EpisodeTape
from dora_pipe.producers.tasks.tape_door import cassette_variables, open_door

SIBLINGS: Final = 8
ANSWER_CHARACTERS: Final = 200
LOOKED_UP: Final = 5_000
RECORDED: Final = 2_000
COMMANDS: Final = 20

_MEMORY: Final = """
import sys
from pathlib import Path
def rss(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
from dora_pipe.producers.tasks.cassette_file import CassetteFile
before = rss()
file = CassetteFile(Path(sys.argv[1]), writes=False)
print(rss() - before)
"""

_AGENT: Final = """
import os, sys, time
from dora_pipe.producers.tasks.tape_client import client_here
tape, calls, text = client_here(), int(sys.argv[1]), "x" * int(sys.argv[2])
began = time.perf_counter()
for at in range(calls):
    call = tape.begin("search", {"query": f"word {at}"})
    if call.found is None:
        call.answered({"value": text})
print(calls / (time.perf_counter() - began))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorFigures:
    """What calls of an agent's own process cost."""

    door_ms: float
    """To open one, and to close it: once in a trajectory."""
    looked_up_per_s: float
    recorded_per_s: float
    command_cpu_ms: float
    """A command whose answer is there: `cassette call` begins and ends. Time of the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CassetteFigures:
    """What a cassette of so many calls costs."""

    calls: int
    file_mb: float
    open_s: float
    memory_mb: float
    """Of a process that has it open."""
    looked_up_per_s: float
    """Calls that it has."""
    recorded_per_s: float
    """Calls that it has not, beside the time of the real one."""


def bench_cassette(calls: int) -> CassetteFigures:
    """Figures of a cassette with so many calls. Raises ResourceError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tools.jsonl")
        _fill(path, calls)
        size = path.stat().st_size
        began = time.perf_counter()
        file = CassetteFile(path)
        opened_s = time.perf_counter() - began
        cassette = Cassette(file=file, mode="record", run="now")
        looked_up = _looked_up(cassette, calls // SIBLINGS)
        recorded = _recorded(cassette)
        file.close()
        memory = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(path)], capture_output=True, check=True, text=True
        )
    return CassetteFigures(
        calls=calls,
        file_mb=size / 1e6,
        open_s=opened_s,
        memory_mb=int(memory.stdout) / 1e6,
        looked_up_per_s=looked_up,
        recorded_per_s=recorded,
    )


def bench_door() -> DoorFigures:
    """Figures of one agent on a cassette of its own. Raises ResourceError."""
    with tempfile.TemporaryDirectory() as folder:
        file = CassetteFile(Path(folder, "tools.jsonl"))

        def tape(run: str) -> EpisodeTape:
            cassette = Cassette(file=file, mode="record", run=run)
            return EpisodeTape(cassette, {"n": 1}, by="g0000000000-000", where="a row")

        program = (sys.executable, "-c", _AGENT, str(RECORDED), str(ANSWER_CHARACTERS))
        recorded = float(asyncio.run(_through(tape("before"), program)))
        looked_up = float(asyncio.run(_through(tape("now"), program)))
        command = (str(Path(sys.executable).parent / "dora-pipe"), "cassette", "call", "--", "true")
        for run in ("before", "now"):
            began = _cpu_of_children()
            asyncio.run(_through(tape(run), command, times=COMMANDS))
            command_s = (_cpu_of_children() - began) / COMMANDS
        began = time.perf_counter()
        asyncio.run(_doors(tape("now")))
        door_s = (time.perf_counter() - began) / RECORDED
        file.close()
    return DoorFigures(
        door_ms=door_s * 1e3,
        looked_up_per_s=looked_up,
        recorded_per_s=recorded,
        command_cpu_ms=command_s * 1e3,
    )


def _cpu_of_children() -> float:
    """Seconds, of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _through(tape: EpisodeTape, program: Sequence[str], *, times: int = 1) -> str:
    """What a program of an agent prints."""
    said = b""
    async with open_door(tape):
        for _ in range(times):
            process = await asyncio.create_subprocess_exec(
                *program,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **cassette_variables()},
            )
            said, _ = await process.communicate()
            assert process.returncode == 0
    return said.decode()


async def _doors(tape: EpisodeTape) -> None:
    for _ in range(RECORDED):
        async with open_door(tape):
            pass


def _fill(path: Path, calls: int) -> None:
    chance = random.Random(1)
    with path.open("wb") as file:
        for at in range(calls):
            row, sibling = at // SIBLINGS, at % SIBLINGS
            digest = row_digest({"n": row})
            text = f"{chance.getrandbits(ANSWER_CHARACTERS * 4):0{ANSWER_CHARACTERS}x}"
            one = Recorded(
                cassette=1,
                row=digest,
                history=digest,
                call=tool_call("search", {"query": f"word {row}"}),
                answer={"text": text, "ok": True},
                run="before",
                by=f"g{row:010d}-{sibling:03d}",
                at_ns=at,
                seconds=0.1,
            )
            file.write(msgspec.json.encode(one) + b"\n")


def _looked_up(cassette: Cassette, rows: int) -> float:
    chance = random.Random(2)
    drawn = [chance.randrange(rows) for _ in range(LOOKED_UP)]
    began = time.perf_counter()
    for at, row in enumerate(drawn):
        by = f"g{row:010d}-{at % SIBLINGS:03d}"
        tape = EpisodeTape(cassette, {"n": row}, by=by, where="a row")
        assert tape.find(tape.ask(tool_call("search", {"query": f"word {row}"}))) is not None
    return LOOKED_UP / (time.perf_counter() - began)


def _recorded(cassette: Cassette) -> float:
    began = time.perf_counter()
    for at in range(RECORDED):
        tape = EpisodeTape(cassette, {"n": -1}, by=f"g{at:010d}-000", where="a row")
        asked = tape.ask(tool_call("search", {"query": f"new {at}"}))
        if tape.find(asked) is None:
            tape.record(asked, {"text": "x" * ANSWER_CHARACTERS, "ok": True}, 0.1)
    return RECORDED / (time.perf_counter() - began)

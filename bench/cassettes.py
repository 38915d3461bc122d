"""Measures a cassette by its size: opening it, a call that it has, one that it records, memory;
decides nothing.

The cassette has calls of one tool, eight siblings to a row, each with an answer of its own.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.producers.tasks.cassette import Recorded, row_digest, tool_call
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.tape import Cassette, EpisodeTape

SIBLINGS: Final = 8
ANSWER_CHARACTERS: Final = 200
LOOKED_UP: Final = 5_000
RECORDED: Final = 2_000

_MEMORY: Final = """
import sys
from pathlib import Path
def rss(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
from dora_pipe.producers.tasks.cassette_file import CassetteFile
before = rss()
file = CassetteFile(Path(sys.argv[1]), writes=False)
print(rss() - before)
"""


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

"""A run whose rows a user's function draws: killed, its function broken and mended, audited."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from dora_pipe.launch.run_dir import opened
from dora_pipe.orchestrator.process.recovery import read_rounds
from dora_pipe.schemas.rounds import Dispatch
from tests.support.user_run import CONFIG, WAIT_S, call, furnish, start, steps, until

pytest.importorskip("torch")

LESSONS = '''
def weights(rows, version):
    """Most of all what is solved half of the time; nothing is left out for ever."""
    means = [row.mean if row.groups else 0.5 for row in rows]
    return [mean * (1 - mean) + 0.02 for mean in means]
'''
BROKEN = """
def weights(rows, version):
    raise LookupError("no lesson today")
"""
JUDGE = """
import zlib

def score(row, text):
    kind = row["answer"]
    return {"hopeless": 0.0, "easy": 1.0}.get(kind, float(zlib.crc32(text.encode()) % 2))
"""
KINDS = ("hopeless",) * 6 + ("half",) * 6 + ("easy",) * 6


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    furnish(tmp_path)
    keys = 'sampler = "lessons:weights"\nmax_solve_rate = 0.9\n'
    config = CONFIG.replace('reward = "judge:score"\n', f'reward = "judge:score"\n{keys}')
    (tmp_path / "config.toml").write_text(config)
    (tmp_path / "lessons.py").write_text(LESSONS)
    (tmp_path / "judge.py").write_text(JUDGE)
    rows = [{"prompt": f"say {index}: ", "answer": kind} for index, kind in enumerate(KINDS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def dispatches(path: Path) -> list[Dispatch]:
    with opened(str(path / "runs" / "tiny")) as run:
        rounds = [logged_round.round for logged_round in read_rounds(run.bus, run.topics)]
    results = [
        decision
        for round_ in rounds
        for decision in round_.decisions
        if isinstance(decision, Dispatch)
    ]
    return [result for result in results if result.spec.purpose == "train"]


def said(path: Path, *words: str) -> tuple[int, str]:
    (path / "said").write_bytes(b"")
    code = call(path, *words)
    return code, (path / "said").read_text()


@pytest.mark.slow
def test_a_sampler_prefers_what_is_half_solved_across_a_kill_and_a_mistake(directory: Path) -> None:
    running = start(directory, "run", "config.toml", "-o", "run.steps=40")
    until(lambda: b"step    6 " in (directory / "said").read_bytes())
    running.send_signal(signal.SIGKILL)
    running.wait(WAIT_S)
    (directory / "lessons.py").write_text(BROKEN)
    code, words = said(directory, "run", "runs/tiny", "--resume")
    assert code == 3, words
    assert "`lessons:weights` cannot be used" in words and "no lesson today" in words
    assert "--resume" in words
    (directory / "lessons.py").write_text(LESSONS)
    code, words = said(directory, "run", "runs/tiny", "--resume")
    assert code == 0, words
    assert len(steps(directory, "tiny")) == 40
    late = Counter(KINDS[dispatch.spec.index] for dispatch in dispatches(directory)[30:])
    assert late["half"] > 2 * late["hopeless"] > 0 and late["half"] > 2 * late["easy"], late
    code, words = said(directory, "audit", "runs/tiny")
    assert code == 0 and "rows were drawn again" not in words, words
    code, words = said(directory, "replay", "runs/tiny")
    assert code == 0, words
    (directory / "lessons.py").write_text(LESSONS + "\n")
    code, words = said(directory, "audit", "runs/tiny")
    assert code == 0 and "rows were drawn again" in words, words
    code, words = said(directory, "run", "config.toml", "-o", 'task.sampler="lessons:lost"')
    assert code == 3 and "`lessons` has no `lost`" in words, words

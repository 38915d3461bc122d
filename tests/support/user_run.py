"""User folder with model, data and reward, and calls of `dora-pipe` in real processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from unittest.mock import patch

from dora_pipe.audit.auditor import audit
from dora_pipe.bus import open_bus
from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.cli.main import main
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.control import StepCommitted, decode_control
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from tests.support.forked import PROGRAM, fork, may_fork
from tests.support.models import make_llama_gqa
from tests.support.tidy import ROOT

CONFIG = """
[run]
name = "tiny"
steps = 3
[model]
path = "model"
[task]
kind = "dataset"
data = "rows.jsonl"
eval_data = "rows.jsonl"
reward = "judge:score"
[sampling]
max_tokens = 12
[rollout]
group_size = 4
prompts_per_step = 2
[evaluation]
prompts = 4
[trainer]
checkpoint_every = 2
[workers]
count = 2
max_num_seqs = 8
max_model_len = 64
[timing]
heartbeat_s = 0.2
lease_s = 5.0
"""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Chat template of few characters."""
REWARD = """
def score(row, text):
    return min(1.0, text.count(row["answer"]) / 3)
"""
WAIT_S = 600.0
WARM_S = 600.0
"""Some tasks import many packages."""


def furnish(path: Path, **changes: Any) -> Path:
    make_llama_gqa(path / "model", **changes)
    (path / "config.toml").write_text(CONFIG)
    (path / "judge.py").write_text(REWARD)
    rows = [{"prompt": f"say {letter}: ", "answer": letter} for letter in "abcdefgh"]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(path: Path, *words: str) -> subprocess.Popen[bytes]:
    with (path / "said").open("ab") as text:
        return _start(path, words, text, text)


def call(path: Path, *words: str) -> int:
    return start(path, *words).wait(WAIT_S)


def answer(path: Path, *words: str, wait_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
    with TemporaryFile() as out, TemporaryFile() as err:
        process = _start(path, words, out, err)
        try:
            code = process.wait(wait_s)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read().decode(), err.read().decode())


def bench(path: Path, *words: str, wait_s: float = WARM_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dora_pipe.bench", *words],
        cwd=path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=wait_s,
        check=False,
    )


def _start(
    path: Path, words: Sequence[str], out: IO[bytes], err: IO[bytes]
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if may_fork():
        return fork(words, path, environment, out.fileno(), err.fileno())
    return subprocess.Popen(
        [PROGRAM, *words],
        cwd=path,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=environment,
    )


def call_here(path: Path, *words: str) -> int:
    """Run `dora-pipe WORDS` in this process, for commands that read; output goes to the file of
    `start`."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    with (
        (path / "said").open("a") as text,
        contextlib.chdir(path),
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
        patch.object(sys, "argv", ["dora-pipe", *words]),
    ):
        try:
            main()
        except SystemExit as ended:
            return 0 if ended.code is None else int(ended.code)
        finally:
            root.handlers[:], root.level = before
    raise AssertionError("a command ends with an exit code")


def facts(path: Path, run: str) -> Iterator[object]:
    with opened(str(path / "runs" / run)) as open_run:
        yield from facts_on(open_run.bus, run)


def facts_of(url: str) -> list[object]:
    address, _, run = url.rpartition("/")
    with closing(open_bus(address)) as bus:
        return list(facts_on(bus, run))


def facts_on(bus: Bus, run: str) -> Iterator[object]:
    control = TopicPartition(Topics(run).control, 0)
    if control.topic in bus.topics():
        for record in records_of(bus, {control: bus.end(control)}):
            yield decode_control(record.value)


def steps(path: Path, run: str) -> list[int]:
    return [fact.step for fact in facts(path, run) if isinstance(fact, StepCommitted)]


def assert_clean(path: Path, run: str) -> None:
    with opened(str(path / "runs" / run)) as open_run:
        report = audit(open_run.bus, open_run.topics, open_run.store)
    assert report.holds, report.violations


def until(done: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    give_up_s = time.monotonic() + wait_s
    while not done():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.05)


def warm_example(path: Path, example: str, keys: Sequence[str], *, steps: int) -> Path:
    (path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, f"examples/{example}/make.py", "made"]
    subprocess.run(command, check=True, cwd=path)
    words = ["sft", f"examples/{example}/config.toml", "warm", "--data", "made/sft.jsonl"]
    words += ["--steps", str(steps), "--learning-rate", "0.004"]
    words += [
        word
        for override in (*keys, f"model.path={path / 'made' / 'model'}")
        for word in ("-o", override)
    ]
    assert start(path, *words).wait(WARM_S) == 0, (path / "said").read_text()
    return path / "warm"


def trajectories(path: Path) -> list[Trajectory]:
    with opened(str(path / "runs" / "tiny")) as run:
        topic = run.topics.trajectories
        ends = {
            entry: run.bus.end(entry)
            for entry in (TopicPartition(topic, index) for index in range(4))
        }
        return [decode_trajectory(record.value) for record in records_of(run.bus, ends)]

"""`dora-pipe run` for real: processes, a SQLite log, torch engine and trainer, a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.bus.port import TopicPartition
from dora_pipe.cli.rundir import opened
from dora_pipe.history.audit import audit
from dora_pipe.history.reading import records_of
from dora_pipe.schemas.control import Command, RunStarted, StepCommitted, decode_control
from tests.support.models import make_llama_gqa

pytest.importorskip("torch")

CONFIG = """
[run]
name = "tiny"
steps = 3
[model]
path = "model"
[task]
kind = "jsonl"
data = "rows.jsonl"
eval_data = "rows.jsonl"
reward = "judge:score"
[sampling]
max_tokens = 12
[groups]
size = 4
per_step = 2
[evaluation]
prompts = 4
[trainer]
checkpoint_every = 2
[workers]
count = 2
slots = 8
prefetch = 8
context_tokens = 64
[timing]
heartbeat_s = 0.2
lease_s = 5.0
"""
REWARD = """
def score(row, text):
    return min(1.0, text.count(row["answer"]) / 3)
"""
WAIT_S = 120.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A user's folder: own configuration, data, reward, and a grouped-query Llama."""
    make_llama_gqa(tmp_path / "model")
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "judge.py").write_text(REWARD)
    rows = [{"prompt": f"say {letter}: ", "answer": letter} for letter in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def start(place: Path, *words: str) -> subprocess.Popen[bytes]:
    """`dora-pipe WORDS` in the user's folder; what it says goes to a file there."""
    with (place / "said").open("ab") as said:
        return subprocess.Popen(
            [Path(sys.executable).parent / "dora-pipe", *words],
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def call(place: Path, *words: str) -> int:
    """Its exit code."""
    return start(place, *words).wait(WAIT_S)


def facts(place: Path, run: str) -> Iterator[object]:
    """The control records of a run."""
    with opened(str(place / "runs" / run)) as open_run:
        control = TopicPartition(open_run.topics.control, 0)
        for record in records_of(open_run.bus, {control: open_run.bus.end(control)}):
            yield decode_control(record.value)


def steps(place: Path, run: str) -> list[int]:
    return [fact.step for fact in facts(place, run) if isinstance(fact, StepCommitted)]


def assert_clean(place: Path, run: str) -> None:
    with opened(str(place / "runs" / run)) as open_run:
        found = audit(open_run.bus, open_run.topics, open_run.store)
    assert found.holds, found.violations


def until(done: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up_s, "it never happened"
        time.sleep(0.05)


def test_a_run_on_the_users_own_material_ends_audited_and_its_policy_loads(place: Path) -> None:
    assert call(place, "run", "config.toml") == 0, (place / "said").read_text()
    assert steps(place, "tiny") == [0, 1, 2]
    assert_clean(place, "tiny")
    said = (place / "said").read_text()
    assert "step    2  reward" in said
    assert "evaluation of version 3" in said

    assert call(place, "export", "tiny", "--policy", "3", "trained") == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(place / "trained")
    model: Any = AutoModelForCausalLM.from_pretrained(place / "trained")
    ids = tokenizer("say a: ", return_tensors="pt")["input_ids"]
    generated = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False).tolist()
    assert len(generated[0]) > ids.shape[1]


@pytest.mark.slow
def test_interrupted_run_goes_on_where_it_was_and_may_change_logged_keys_only(place: Path) -> None:
    running = start(place, "run", "config.toml", "-o", "run.steps=40")
    until(lambda: b"step    1 " in (place / "said").read_bytes())
    running.send_signal(signal.SIGINT)
    assert running.wait(WAIT_S) == 130
    done = steps(place, "tiny")
    assert done == list(range(len(done)))
    assert 2 <= len(done) < 40
    assert_clean(place, "tiny")
    assert "--resume" in (place / "said").read_text()

    inside = "runs/tiny"
    assert call(place, "run", inside, "--resume", "-o", "groups.size=5") == 3
    assert "cannot change groups.size" in (place / "said").read_text()

    changes = (f"run.steps={len(done) + 2}", "trainer.learning_rate=5e-5")
    words = [word for change in changes for word in ("-o", change)]
    assert call(place, "run", inside, "--resume", *words) == 0, (place / "said").read_text()
    assert steps(place, "tiny") == list(range(len(done) + 2))
    assert_clean(place, "tiny")
    (command,) = [fact for fact in facts(place, "tiny") if isinstance(fact, Command)]
    assert command.args == {"run.steps": len(done) + 2, "trainer.learning_rate": 5e-5}
    last = [fact for fact in facts(place, "tiny") if isinstance(fact, StepCommitted)][-1]
    assert last.settings["trainer.learning_rate"] == 5e-5
    assert call(place, "replay", "tiny") == 0, (place / "said").read_text()


@pytest.mark.slow
def test_a_new_run_starts_from_a_policy_of_another_and_says_so(place: Path) -> None:
    assert call(place, "run", "config.toml") == 0
    words = ("-o", 'run.name="child"', "-o", "run.steps=1", "--from", "tiny@2")
    assert call(place, "run", "config.toml", *words) == 0, (place / "said").read_text()
    parents = [fact for fact in facts(place, "tiny") if isinstance(fact, StepCommitted)]
    (child,) = [fact for fact in facts(place, "child") if isinstance(fact, RunStarted)]
    assert child.lineage is not None
    assert (child.lineage.run, child.lineage.step) == ("tiny", 2)
    assert child.policy == parents[1].policy
    assert_clean(place, "child")
    missing = ("-o", 'run.name="other"', "--from", "tiny@9")
    assert call(place, "run", "config.toml", *missing) == 2
    assert "tiny has no version 9" in (place / "said").read_text()
    assert not (place / "runs" / "other" / "config.toml").exists()


@pytest.mark.slow
def test_roles_started_one_by_one_make_a_run(place: Path) -> None:
    running = [start(place, "orchestrator", "config.toml")]
    until(lambda: (place / "runs" / "tiny" / "log.sqlite").exists())
    running.append(start(place, "worker", "config.toml", "--name", "a"))
    running.append(start(place, "worker", "config.toml", "--name", "b"))
    running.append(start(place, "trainer", "config.toml"))
    assert [role.wait(WAIT_S) for role in running] == [0, 0, 0, 0], (place / "said").read_text()
    assert steps(place, "tiny") == [0, 1, 2]
    assert_clean(place, "tiny")

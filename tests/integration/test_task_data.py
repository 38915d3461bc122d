"""Large data of a task: prepared while no limit counts, mapped by its processes, the same rows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from msgspec.structs import replace

from dora_pipe.config import model
from dora_pipe.core.errors import TaskError
from dora_pipe.producers.data.prepare import CACHE_VARIABLE, MEMORY_BYTES_MAX
from dora_pipe.producers.tasks.calls import PromptReady
from dora_pipe.producers.tasks.pool import START_LIMIT_S, TaskPool
from tests.support.task_pool import DEADLINE_S, ask, prompt, survey
from tests.support.worker import VirtualClock

ROWS, TEXT = 40_000, "x" * 1000
REWARD = "def score(row, text): return float(text == row['answer'])\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    (folder / "rewards.py").write_text(REWARD)
    with (folder / "rows.jsonl").open("w") as file:
        for n in range(ROWS):
            file.write(json.dumps({"prompt": f"{n} {TEXT}", "answer": str(n)}) + "\n")
    assert (folder / "rows.jsonl").stat().st_size > MEMORY_BYTES_MAX
    return folder


@pytest.fixture
def task(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[model.Task]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    yield model.Task(
        kind="dataset",
        data=str(data / "rows.jsonl"),
        eval_share=0.01,
        reward="rewards:score",
        directory=str(data),
    )


def test_prompts_come_of_prepared_rows_and_the_share_is_held_out(
    task: model.Task, tmp_path: Path
) -> None:
    with TaskPool(task) as pool:
        facts = pool.wait()
        ready = ask(pool, prompt("a", index=7))
    assert isinstance(ready, PromptReady)
    assert ready.text.endswith(TEXT)
    assert facts.train_rows + facts.eval_rows == ROWS
    assert facts.single_turn, "its requests may move"
    assert 0.005 * ROWS < facts.eval_rows < 0.02 * ROWS
    assert len(list((tmp_path / "cache" / "data").glob("*.rows"))) == 2


def test_no_limit_counts_while_data_are_made_ready(task: model.Task, tmp_path: Path) -> None:
    clock, folder = VirtualClock(), tmp_path / "cache" / "data"
    with TaskPool(task, clock=clock) as pool:
        for splits in (1, 2):
            until = time.monotonic() + DEADLINE_S
            pool.poll()
            while len(list(folder.glob("*.rows"))) < splits and time.monotonic() < until:
                time.sleep(0.02)
            clock.sleep(0.9 * START_LIMIT_S)
        assert pool.wait().train_rows > 0.9 * ROWS


def test_what_cannot_be_prepared_is_refused_by_line(task: model.Task, data: Path) -> None:
    broken = data / "broken.jsonl"
    broken.write_bytes((data / "rows.jsonl").read_bytes() + b'{"prompt": \n')
    with pytest.raises(TaskError, match=rf"broken\.jsonl, line {ROWS + 1}: "):
        survey(replace(task, data=str(broken)))


# Data sets of the hub, from the cache that `datasets` keeps.

INFO = {
    "features": {name: {"dtype": "string", "_type": "Value"} for name in ("prompt", "answer")},
    "builder_name": "json",
    "dataset_name": "sums",
    "config_name": "default",
    "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "delta": 0},
    "splits": {"train": {"name": "train", "num_examples": 2, "dataset_name": "sums"}},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "hub/datasets/nobody___sums/default/0.0.0/b180f6f1d7f4edbe"
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist([{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(2)])
    with pa.ipc.new_stream(folder / "sums-train.arrow", table.schema) as file:
        file.write_table(table)
    (folder / "dataset_info.json").write_text(json.dumps(INFO))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.mark.usefixtures("hub")
def test_data_set_of_the_hub_is_read_without_a_network() -> None:
    with TaskPool(model.Task(kind="dataset", data="hf:nobody/sums", reward="exact")) as pool:
        assert pool.wait().train_rows == 2
        ready = ask(pool, prompt("a", index=1))
    assert isinstance(ready, PromptReady)
    assert ready.text == "1+1="


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("hf:nobody/sum", "", "hf:nobody/sum: Couldn't reach 'nobody/sum' on the Hub"),
        ("hf:nobody/sums:main", "", "Available configs in the cache: ['default']"),
        ("hf:nobody/sums", "test", 'Unknown split "test"'),
    ],
)
def test_what_neither_cache_nor_network_has_is_one_line(
    name: str, split: str, message: str
) -> None:
    with pytest.raises(TaskError) as caught:
        survey(model.Task(kind="dataset", data=name, split=split, reward="exact"))
    assert message in caught.value.message
    assert "HF_HUB_OFFLINE=1" in str(caught.value.hint)

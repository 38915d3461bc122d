"""Tests of tasks by name: arguments and digests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, DoraError, TaskError
from dora_pipe.producers.tasks.registry import open_task, reward_digest, rows_digest
from dora_pipe.producers.tasks.task import Row, Split, Task

HERE = __name__


class Mine(Task):
    def __init__(self, size: int = 2, data: str = "") -> None:
        self.size, self.data = size, data

    def rows(self, split: Split) -> Sequence[Row]:
        return [{"n": n} for n in range(self.size)]


READY = Mine(size=5)
NUMBER = 3


def make(size: int) -> Task:
    return Mine(size=size)


def make_nothing(**anything: int) -> str:
    return "no task"


def of(kind: str, **keys: Any) -> Task:
    return open_task(model.Task(kind=kind, **keys))


def test_users_class_function_or_object_is_a_task() -> None:
    assert len(of(f"{HERE}:Mine", options={"size": 4}).rows("train")) == 4
    assert len(of(f"{HERE}:make", options={"size": 6}).rows("train")) == 6
    assert of(f"{HERE}:READY") is READY


@pytest.mark.parametrize(
    ("kind", "keys", "error", "message"),
    [
        ("arithmetik", {}, ConfigError, "did you mean `arithmetic`?"),
        ("chess", {}, ConfigError, "one of arithmetic, calculator, dataset"),
        ("arithmetic", {"options": {"cuont": 1}}, ConfigError, "did you mean `count`?"),
        ("arithmetic", {"data": "x"}, ConfigError, "task.data: `arithmetic` has no such argument"),
        ("dataset", {}, ConfigError, "task.data"),
        (f"{HERE}:make", {}, ConfigError, "missing a required argument: 'size'"),
        (f"{HERE}:Min", {}, TaskError, "did you mean `Mine`?"),
        (f"{HERE}:NUMBER", {}, TaskError, "neither a Task nor a factory"),
        (f"{HERE}:make_nothing", {"options": {"a": 1}}, TaskError, "gave str, not a Task"),
        (f"{HERE}:READY", {"options": {"a": 1}}, ConfigError, "is an object and accepts no `a`"),
        ("no_such_module:Task", {}, TaskError, "cannot import `no_such_module`"),
        (":Task", {}, ConfigError, "not of the form"),
    ],
)
def test_what_cannot_be_opened_is_explained(
    kind: str, keys: dict[str, Any], error: type[DoraError], message: str
) -> None:
    with pytest.raises(error) as caught:
        of(kind, **keys)
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_dataset_digest_covers_every_row_and_its_place() -> None:
    base, count = rows_digest([{"a": 1}, {"a": 2}], "train")
    assert count == 2
    assert rows_digest([{"a": 2}, {"a": 1}], "train")[0] != base
    assert rows_digest([{"a": 1}, {"a": 3}], "train")[0] != base
    assert rows_digest([{"a": 1}], "train")[0] != base


def test_row_that_is_not_plain_json_is_named() -> None:
    with pytest.raises(TaskError, match="row 1 of `train` is not plain JSON"):
        rows_digest([{"a": 1}, {"a": object()}], "train")


def test_reward_digest_follows_the_source_of_the_users_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a"}\n')
    digests = set()
    for number in range(2):
        name = f"digested_{tmp_path.name}_{number}"
        (tmp_path / f"{name}.py").write_text(f"def score(row, text): return {number}.0\n")
        digests.add(reward_digest(of("dataset", data=str(data), reward=f"{name}:score")))
    assert len(digests) == 2
    assert all(len(digest) == 64 for digest in digests)

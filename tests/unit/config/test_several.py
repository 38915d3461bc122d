"""Tests of `[[task]]` and `[[evaluation]]` lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config.load import changed_keys, dump_toml, from_plain, leaves, load_config
from dora_pipe.config.logged import logged_config
from dora_pipe.config.several import pool_specs, with_tasks_of
from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.tasks.registry import open_task

ONE = """
[run]
name = "r"
steps = 4
[model]
path = "m"
[sampling]
temperature = 0.7
"""
SEVERAL = f"""{ONE}
[[task]]
name = "add"
ratio = 3
kind = "arithmetic"
data = "rows.jsonl"
[task.options]
n_max = 9
[[task]]
name = "tools"
kind = "calculator"
[[evaluation]]
name = "easy"
prompts = 4
[[evaluation]]
name = "hard"
task = "tools"
data = "hard.jsonl"
every = 2
sampling = {{ top_k = 5 }}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "run.toml").write_text(SEVERAL)
    return path


def test_all_are_read_with_paths_directories_and_sampling_of_their_own(file: Path) -> None:
    config = load_config(file, ())
    assert [(task.name, task.ratio, task.directory) for task in config.tasks] == [
        ("add", 3.0, str(file.parent)),
        ("tools", 1.0, str(file.parent)),
    ]
    assert config.task.data == str(file.parent / "rows.jsonl")
    easy, hard = config.evaluations
    assert hard.data == str(file.parent / "hard.jsonl")
    assert (easy.sampling.temperature, hard.sampling.temperature) == (0.7, 0.7)
    assert (easy.sampling.top_k, hard.sampling.top_k) == (0, 5)


def test_what_is_stored_reads_back_the_same(file: Path, tmp_path: Path) -> None:
    config = load_config(file, ())
    (stored := tmp_path / "stored.toml").write_text(dump_toml(config))
    assert load_config(stored, ()) == config
    plain = msgspec.to_builtins(config)
    assert from_plain(plain) == logged_config(plain) == config


def test_a_run_with_one_has_the_plain_values_that_it_had(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(f'{ONE}[task]\nkind = "arithmetic"\n')
    (tmp_path / "list.toml").write_text(f'{ONE}[[task]]\nkind = "arithmetic"\n')
    config = load_config(tmp_path / "one.toml", ())
    assert load_config(tmp_path / "list.toml", ()) == config
    plain: dict[str, Any] = msgspec.to_builtins(config)
    assert not [key for key in plain if key.startswith("more_")]
    assert "\n[task]\n" in dump_toml(config)
    assert leaves(config)["task.kind"] == "arithmetic"


def test_overrides_name_one(file: Path) -> None:
    words = ("task.tools.max_turns=3", "evaluation.easy.sampling.top_k=7", "task.add.options.a=1")
    config = load_config(file, words)
    assert [task.most_turns for task in config.tasks] == [8, 3]
    assert config.task.options == {"n_max": 9, "a": 1}
    assert config.evaluation.sampling.top_k == 7
    moved = load_config(file, ("evaluation.hard.data=other.jsonl",))
    assert moved.evaluations[1].data == str(Path.cwd() / "other.jsonl")


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("task.max_turns=3", "task.max_turns: name one of add, tools"),
        ("task.tool.max_turns=3", "task.tool: name one of add, tools"),
        ("task.tools.turns=3", "unknown key `task.turns`"),
        ("task.tools.ratio=0", "task[1].ratio: "),
        ("more_tasks=[]", "unknown key `more_tasks`"),
        ("task.tools.name=add", "task.name: used twice: add"),
        ("task.tools.name='a b'", "task.name: 'a b' is not a valid name"),
        ("task.tools.name=", "task.name: one of 2 has no name"),
        ("evaluation.hard.task=none", "evaluation.task: unknown task none"),
    ],
)
def test_what_means_nothing_is_one_line(file: Path, word: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(file, (word,))
    assert raised.value.message.startswith(text)


def test_frozen_keys_of_each_stay(file: Path) -> None:
    config = load_config(file, ())
    for word, frozen in (
        ("task.tools.ratio=2", {"task.tools.ratio"}),
        ("task.tools.processes=2", set()),
        ("evaluation.hard.every=3", {"evaluation.hard.every"}),
    ):
        assert changed_keys(config, load_config(file, (word,)))[0] == frozen
    fewer = msgspec.structs.replace(config, more_tasks=msgspec.UNSET)
    assert {"task.tools.kind", "task.kind"} <= changed_keys(config, fewer)[0]


def test_task_processes_are_shared_where_the_data_are(file: Path) -> None:
    config = load_config(file, ("evaluation.easy.task=tools",))
    results = [
        (spec.task.name, spec.task.eval_data[-10:], spec.sources) for spec in pool_specs(config)
    ]
    assert results == [
        ("add", "", ("train/add",)),
        ("tools", "", ("train/tools", "eval/easy")),
        ("tools", "hard.jsonl", ("eval/hard",)),
    ]


def test_processes_of_an_evaluation_with_data_of_its_own_open_no_others(tmp_path: Path) -> None:
    (tmp_path / "hard.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (path := tmp_path / "run.toml").write_text(
        f"{ONE}[task]\nkind = 'dataset'\ndata = 'gone.jsonl'\nreward = 'exact'\n"
        "[evaluation]\ndata = 'hard.jsonl'\n"
    )
    *_, pool = pool_specs(load_config(path, ()))
    task = open_task(pool.task)
    task.check()
    assert pool.sources == ("eval",)
    assert [len(task.rows(split)) for split in ("train", "eval")] == [1, 1]


def test_each_machine_has_its_own_processes_and_folders(file: Path) -> None:
    config = load_config(file, ())
    local = load_config(file, ("task.tools.processes=3", "task.add.ratio=9"))
    tasks = with_tasks_of(config, local)
    assert [(task.processes, task.ratio) for task in tasks.tasks] == [(1, 3.0), (3, 1.0)]

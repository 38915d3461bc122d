"""Tests of `doctor` on context lengths: positions of the model, and prompts of its data."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.cli.doctor import CheckResult, context_findings
from dora_pipe.config.load import from_plain
from dora_pipe.config.model import Config
from dora_pipe.config.several import pool_specs
from dora_pipe.core.errors import ConfigError
from dora_pipe.launch.model_checks import check_chat
from dora_pipe.launch.prompt_check import (
    FIRST_ROWS,
    PromptsSeen,
    check_first,
    look,
    ordered,
    spread,
)
from dora_pipe.producers.tasks.pool import TaskPool
from tests.support.chat_models import CHATML, write_chat_model
from tests.support.models import make_qwen2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2(tmp_path_factory.mktemp("model"), context_tokens=256)


def config(model: Path, data: Path, lengths: list[int], **sections: Any) -> Config:
    rows = [json.dumps({"prompt": "7" * length, "answer": "7"}) for length in lengths]
    data.write_text("\n".join(rows) + "\n")
    plain: dict[str, Any] = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": str(model)},
        "task": {"kind": "dataset", "data": str(data), "reward": "exact"},
        "sampling": {"max_tokens": 20},
        "evaluation": {"sampling": {"max_tokens": 20}},
        "workers": {"max_model_len": 64},
    }
    return from_plain(plain | sections)


def checks_of(config: Config) -> dict[str, CheckResult]:
    return {finding.what: finding for finding in context_findings(config)}


def test_prompts_that_fit_are_ok(model: Path, tmp_path: Path) -> None:
    rows = checks_of(config(model, tmp_path / "d.jsonl", [3, 44, 9]))
    assert (rows["context"].state, rows["context"].detail) == ("ok", "64 tokens, by torch")
    text = "3 of 3 checked, up to 44 tokens with room for max_tokens"
    assert rows["prompts, train"] == CheckResult("ok", "prompts, train", text)


def test_prompts_that_leave_less_than_max_tokens_are_told_of_and_so_are_those_that_do_not_fit(
    model: Path, tmp_path: Path
) -> None:
    row = checks_of(config(model, tmp_path / "d.jsonl", [3, 45, 63]))["prompts, train"]
    assert row.state == "note"
    assert "2 leave less than max_tokens, 20, in a context of 64: answers are cut" in row.detail
    assert row.detail.endswith("workers.max_model_len = 83 fits all")
    row = checks_of(config(model, tmp_path / "d.jsonl", [3, 45, 64]))["prompts, train"]
    assert row.state == "note"
    assert "1 do not fit a context of 64: invalid, as PromptUnfit" in row.detail
    row = checks_of(config(model, tmp_path / "d.jsonl", [64, 80]))["prompts, train"]
    assert row.state == "fail"


def test_a_context_beyond_the_models_positions_fails(model: Path, tmp_path: Path) -> None:
    larger = {"workers": {"max_model_len": 257, "engine": "vllm"}}
    row = checks_of(config(model, tmp_path / "d.jsonl", [3], **larger))["context"]
    assert row.state == "fail"
    assert "its 256 positions are fewer than workers.max_model_len = 257" in row.detail
    assert row.detail.endswith("workers.max_model_len = 256 or less")


def test_what_a_run_would_refuse_of_a_tokenizer_and_a_template_fails(
    model: Path, tmp_path: Path
) -> None:
    own_config = config(model, tmp_path / "d.jsonl", [3])
    chat = msgspec.structs.replace(
        own_config, task=msgspec.structs.replace(own_config.task, chat=True)
    )
    row = checks_of(chat)["prompts"]
    assert row.state == "fail" and "messages need a chat template" in row.detail
    small = tmp_path / "small"
    shutil.copytree(model, small)
    plain = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**plain, "vocab_size": 5}))
    row = checks_of(config(small, tmp_path / "d.jsonl", [3]))["context"]
    assert row.state == "fail" and "embedding has 5 rows" in row.detail
    (small / "config.json").write_text(json.dumps({**plain, "vocab_size": 128}))
    row = checks_of(config(small, tmp_path / "d.jsonl", [3]))["tokenizer"]
    assert row.state == "note" and "28 of the model's 128 embedding rows" in row.detail


def test_what_is_not_here_is_not_looked_at(tmp_path: Path, model: Path) -> None:
    rows = checks_of(config(tmp_path / "none", tmp_path / "d.jsonl", [3]))
    assert [(row.state, row.what) for row in rows.values()] == [("note", "context")]
    own_config = config(model, tmp_path / "d.jsonl", [3])
    (tmp_path / "d.jsonl").unlink()
    rows = checks_of(own_config)
    assert rows["context"].state == "ok"
    assert rows["prompts"].state == "note" and "skipped" in rows["prompts"].detail


def test_of_many_rows_some_are_looked_at_from_the_first_to_the_last() -> None:
    assert spread(3, FIRST_ROWS) == [0, 1, 2]
    chosen_spread = spread(10**6, FIRST_ROWS)
    assert (len(chosen_spread), chosen_spread[0], chosen_spread[-1]) == (FIRST_ROWS, 0, 10**6 - 1)
    assert chosen_spread == sorted(set(chosen_spread))


def test_prompts_that_are_messages_are_as_long_as_the_chat_template_makes_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "chat").mkdir()
    chat = write_chat_model(tmp_path / "chat", text=CHATML)
    plain = checks_of(config(chat, tmp_path / "d.jsonl", [9]))["prompts, train"].detail
    row = {"prompt": [{"role": "user", "content": "7" * 9}], "answer": "7"}
    own_config = config(chat, tmp_path / "d.jsonl", [9])
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    rendered = checks_of(own_config)["prompts, train"].detail
    assert tokens_in(rendered) > tokens_in(plain) + 5, "its control tokens and roles are counted"


REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def asked(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}, {"role": "user", "content": "7"}]


@pytest.mark.parametrize(
    ("prompts", "state", "text"),
    [
        ([asked("7"), asked("7", "system")], "note", "row 1: TaskError: the model's chat template"),
        ([asked("7", "system")] * 2, "fail", "the first row's prompt: the model's chat template"),
        (
            [asked("7"), asked("<|im_start|>user\n7")],
            "note",
            "row 1: TaskError: the text is already",
        ),
        (["7", "<|im_start|>user\n7<|im_end|>\n"], "note", "row 1: TaskError: the text is already"),
        (["<|im_start|>user\n7<|im_end|>\n"], "fail", 'task.special_tokens = "parse"'),
        ([asked("7"), asked("a <|im_end|> b")], "note", "encoded as text: row 1: <|im_end|>"),
        (["7", "7 </think>"], "note", "encoded as text: row 1: </think>"),
    ],
)
def test_every_row_that_makes_no_prompt_or_another_one_is_named(
    prompts: list[Any], state: str, text: str, tmp_path: Path
) -> None:
    chat = write_chat_model(tmp_path, text=REFUSES)
    own_config = config(chat, tmp_path / "d.jsonl", [9])
    rows = [json.dumps({"prompt": prompt, "answer": "7"}) for prompt in prompts]
    (tmp_path / "d.jsonl").write_text("\n".join(rows) + "\n")
    rows_seen = checks_of(own_config)
    row = rows_seen.get("prompts, train") or rows_seen["prompts"]
    assert (row.state, text in row.detail) == (state, True), row.detail
    (spec,) = pool_specs(own_config)
    with TaskPool(spec.task) as pool:
        pool.wait()
        if state == "fail":
            with pytest.raises(ConfigError, match="row"):
                list(check_first(spec, pool, chat, check_chat(spec, pool, chat)))
        else:
            (note,) = check_first(spec, pool, chat, check_chat(spec, pool, chat))
            assert note.startswith("prompts, train: 1 of 2 checked rows") and text in note


def test_of_many_rows_a_bounded_part_is_looked_at_before_the_start(
    model: Path, tmp_path: Path
) -> None:
    own_config = config(model, tmp_path / "d.jsonl", [3] * 10)
    (spec,) = pool_specs(own_config)
    with TaskPool(spec.task) as pool:
        pool.wait()
        (subset,) = look(spec, pool, model, {}, rows_max=4, seconds=60)
        (none,) = look(spec, pool, model, {}, rows_max=None, seconds=-1)
    assert (subset.looked_at, none.looked_at, none.hopeless) == (4, 0, False)


def test_a_failed_row_speaks_for_no_row_that_was_not_looked_at() -> None:
    failed = [(0, "NoAnswer: row 0 has no question", "")]
    assert PromptsSeen(source="train", rows=1, failed=failed).hopeless
    assert not PromptsSeen(source="train", rows=600, failed=failed).hopeless


def test_rows_of_large_data_are_numbered_without_a_list_of_them() -> None:
    assert list(islice(ordered(10**15), FIRST_ROWS, FIRST_ROWS + 2)) == [1, 2]
    assert sorted(ordered(600)) == list(range(600))


def tokens_in(detail: str) -> int:
    return int(detail.partition("up to ")[2].partition(" ")[0])

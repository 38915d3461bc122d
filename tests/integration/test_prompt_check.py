"""Rows that make no prompt are named before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.load import from_plain
from dora_pipe.config.model import Config
from dora_pipe.config.several import pool_specs
from dora_pipe.core.errors import DoraError
from dora_pipe.launch.model_checks import check_chat
from dora_pipe.launch.prompt_check import (
    FIRST_ROWS,
    PromptsSeen,
    check_first,
    look,
    spread,
)
from dora_pipe.producers.tasks.pool import TaskPool
from tests.support.chat_models import write_chat_model
from tests.support.models import make_qwen2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen2(tmp_path_factory.mktemp("model"), context_tokens=256)


def config(model: Path, data: Path, lengths: list[int], **sections: Any) -> Config:
    """A run on prompts of so many tokens: one for each character."""
    rows = [json.dumps({"prompt": "7" * length, "answer": "7"}) for length in lengths]
    data.write_text("\n".join(rows) + "\n")
    plain: dict[str, Any] = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": str(model)},
        "task": {"kind": "dataset", "data": str(data), "reward": "exact"},
        "sampling": {"max_tokens": 20},
        "evaluation": {"sampling": {"max_tokens": 20}},
        "workers": {"context_tokens": 64},
    }
    return from_plain(plain | sections)


def test_of_many_rows_some_are_looked_at_from_the_first_to_the_last() -> None:
    assert spread(3, FIRST_ROWS) == [0, 1, 2]
    some = spread(10**6, FIRST_ROWS)
    assert (len(some), some[0], some[-1]) == (FIRST_ROWS, 0, 10**6 - 1)
    assert some == sorted(set(some))


REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def asked(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}, {"role": "user", "content": "7"}]


@pytest.mark.parametrize(
    ("prompts", "state", "said"),
    [
        ([asked("7"), asked("7", "system")], "note", "row 1: TaskError: the model's chat template"),
        ([asked("7", "system")] * 2, "fail", "the first row's prompt: the model's chat template"),
        ([asked("7"), asked("<|im_start|>user\n7")], "note", "row 1: TaskError: the text is rend"),
        (["7", "<|im_start|>user\n7<|im_end|>\n"], "note", "row 1: TaskError: the text is rend"),
        (["<|im_start|>user\n7<|im_end|>\n"], "fail", 'task.special_tokens = "parse"'),
        ([asked("7"), asked("a <|im_end|> b")], "note", "become letters: row 1: <|im_end|>"),
        (["7", "7 </think>"], "note", "become letters: row 1: </think>"),
    ],
)
def test_every_row_that_makes_no_prompt_or_another_one_is_named(
    prompts: list[Any], state: str, said: str, tmp_path: Path
) -> None:
    chat = write_chat_model(tmp_path, text=REFUSES)
    wanted = config(chat, tmp_path / "d.jsonl", [9])
    rows = [json.dumps({"prompt": prompt, "answer": "7"}) for prompt in prompts]
    (tmp_path / "d.jsonl").write_text("\n".join(rows) + "\n")
    (spec,) = pool_specs(wanted)
    with TaskPool(spec.task) as pool:
        pool.wait()
        if state == "fail":
            with pytest.raises(DoraError, match="row") as refused:
                list(check_first(spec, pool, chat, check_chat(spec, pool, chat)))
            assert said in f"{refused.value.message} {refused.value.hint}"
        else:
            (note,) = check_first(spec, pool, chat, check_chat(spec, pool, chat))
            assert note.startswith("prompts, train: 1 of 2 rows") and said in note


def test_of_many_rows_a_bounded_part_is_looked_at_before_the_start(
    model: Path, tmp_path: Path
) -> None:
    wanted = config(model, tmp_path / "d.jsonl", [3] * (FIRST_ROWS + 9))
    (spec,) = pool_specs(wanted)
    with TaskPool(spec.task) as pool:
        pool.wait()
        (some,) = look(spec, pool, model, {}, seconds=60)
        (none,) = look(spec, pool, model, {}, seconds=-1)
    assert (some.looked_at, none.looked_at, none.hopeless) == (FIRST_ROWS, 0, False)


def test_a_failed_row_speaks_for_no_row_that_was_not_looked_at() -> None:
    failed = [(0, "NoAnswer: row 0 has no question", "")]
    assert PromptsSeen(source="train", rows=1, failed=failed).hopeless
    assert not PromptsSeen(source="train", rows=600, failed=failed).hopeless

"""A supervised warm start teaches what the rows say, the same way every time."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dora_pipe.consumers.learners import sft
from dora_pipe.consumers.learners.sft import Example, SftOptions, SftResult, rows_of, train_sft
from dora_pipe.consumers.learners.torch.lora import LoraOptions
from dora_pipe.core.errors import PolicyError, TaskError
from dora_pipe.launch.warm_start import Row, RowEncoder, read_rows
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.store.safetensors_file import read_manifest
from tests.support.models import make_llama_gqa, make_qwen2

ROWS = [Row("2+2=", "4"), Row("3+4=", "7"), Row("9-1=", "8"), Row("5*1=", "5")]


@pytest.fixture(scope="module", params=["qwen2", "llama-gqa"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(str(request.param))
    return {"qwen2": make_qwen2, "llama-gqa": make_llama_gqa}[request.param](root / "model")


def warm_up(model_dir: Path, out: Path, **options: Any) -> SftResult:
    settings = {"steps": 40, "batch": 4, "learning_rate": 3e-3} | options
    rows = settings.pop("rows", ROWS)
    told = {"progress": settings.pop("progress")} if "progress" in settings else {}
    encode = settings.pop("encode", None) or RowEncoder(model_dir, Tokenizer(model_dir))
    return train_sft(model_dir, rows, out, encode=encode, options=SftOptions(**settings), **told)


def digest_of(directory: Path) -> str:
    return read_manifest(directory / "model.safetensors").digest


def answer(model_dir: Path, prompt: str) -> tuple[str, bool]:
    """What the model says greedily, and whether it then ends."""
    tokenizer = Tokenizer(model_dir)
    load: Any = AutoModelForCausalLM.from_pretrained
    network = load(model_dir)
    ids = tokenizer.prompt_ids(prompt)
    said: list[int] = []
    while len(said) < 4 and (not said or said[-1] not in tokenizer.stop_ids):
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([[*ids, *said]])).logits[0, -1]
        said.append(int(logits.argmax()))
    return tokenizer.text(said), said[-1] in tokenizer.stop_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": True, "context_tokens": 32},
        {"schedule": "cosine", "warmup_steps": 4, "learning_rate_min": 0.1, "weight_decay": 0.01},
    ],
    ids=["plain", "packed", "cosine"],
)
def test_model_says_the_answers_and_ends_after_them(
    model_dir: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    losses: dict[int, float] = {}
    last = warm_up(
        model_dir,
        tmp_path / "out",
        progress=lambda step, loss: losses.update({step: loss}),
        **options,
    ).loss
    assert list(losses) == list(range(1, 41))
    assert losses[40] == last < 0.1 < losses[1]
    for row in ROWS:
        assert answer(tmp_path / "out", row.prompt) == (row.answer, True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert "adapter" not in names


def test_adapter_learns_beside_the_model_and_is_written_merged_and_alone(
    model_dir: Path, tmp_path: Path
) -> None:
    lora = LoraOptions(rank=8, alpha=16.0, targets=("q_proj", "v_proj", "down_proj"))
    losses: list[float] = []
    warm_up(
        model_dir,
        tmp_path / "out",
        lora=lora,
        learning_rate=3e-2,
        progress=lambda _, loss: losses.append(loss),
    )
    assert losses[-1] < 0.7 * losses[0]
    adapted = {path.name for path in (tmp_path / "out" / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= adapted
    warm_up(model_dir, tmp_path / "base", steps=1, learning_rate=0.0)
    base, merged = (
        {one.name: one.sha256 for one in read_manifest(where / "model.safetensors").tensors}
        for where in (tmp_path / "base", tmp_path / "out")
    )
    changed = {name.split(".")[-2] for name in base if merged[name] != base[name]}
    assert changed == set(lora.targets)


def test_equal_seeds_give_equal_weights_and_others_do_not(model_dir: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        warm_up(model_dir, tmp_path / name, steps=3, batch=2, seed=seed)
    digests = [digest_of(tmp_path / name) for name in ("one", "same", "other")]
    assert digests[0] == digests[1] != digests[2]


# Examples that share a row.

EXAMPLES = st.lists(st.integers(2, 20), min_size=1, max_size=30).map(
    lambda lengths: [
        Example(token_ids=[place] * length, mask=[0] + [1] * (length - 1))
        for place, length in enumerate(lengths)
    ]
)


@given(EXAMPLES)
def test_packed_rows_hold_every_example_once_and_none_is_too_long(examples: list[Example]) -> None:
    rows = rows_of(examples, packing=True, context_tokens=20)
    assert all(row.tokens <= 20 for row in rows)
    held = [one.token_ids[0] for row in rows for one in row.examples]
    assert sorted(held) == list(range(len(examples)))
    total = sum(len(one.token_ids) for one in examples)
    assert len(rows) <= max(1, math.ceil(2 * total / 20))


def test_packing_changes_no_update_beyond_the_order_of_sums(
    model_dir: Path, tmp_path: Path
) -> None:
    losses: dict[str, list[float]] = {"apart": [], "packed": []}
    for name in losses:
        warm_up(
            model_dir,
            tmp_path / name,
            steps=4,
            packing=name == "packed",
            context_tokens=64,
            progress=lambda _, loss, to=losses[name]: to.append(loss),
        )
    assert losses["packed"] == pytest.approx(losses["apart"], rel=1e-4)


def test_model_whose_examples_would_see_each_other_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaking(rows: Any, micro: Any) -> Any:
        passage = real(rows, micro)
        return replace(passage, positions=None)

    real = sft._passage
    monkeypatch.setattr(sft, "_passage", leaking)
    with pytest.raises(PolicyError, match="see each other"):
        warm_up(model_dir, tmp_path / "out", packing=True, context_tokens=64)
    assert not (tmp_path / "out").exists()


def test_rows_longer_than_the_context_are_left_out_and_counted(
    model_dir: Path, tmp_path: Path
) -> None:
    long = Row("2+2=" * 8, "4")
    done = warm_up(model_dir, tmp_path / "out", rows=[*ROWS, long], steps=5, context_tokens=16)
    assert done.left_out > 0
    with pytest.raises(TaskError, match="no row has at most 2 tokens"):
        warm_up(model_dir, tmp_path / "none", context_tokens=2)


def test_batch_without_a_token_to_learn_is_refused(model_dir: Path, tmp_path: Path) -> None:
    def nothing(row: Row) -> Example:
        return Example(token_ids=[1, 2, 3], mask=[1, 0, 0])

    with pytest.raises(TaskError, match="no token to learn"):
        warm_up(model_dir, tmp_path / "out", encode=nothing)


# Rows.


def test_rows_come_from_a_file_too(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "2+2=", "answer": "4", "more": 1}\n\n{"prompt": "3+4=", "answer": "7"}\n'
    )
    assert read_rows(rows) == ROWS[:2]


@pytest.mark.parametrize(
    "line", ['{"prompt": "a"}', '{"prompt": 1, "answer": "b"}', "[]", "nonsense", "\xff"]
)
def test_line_without_the_two_texts_is_named(tmp_path: Path, line: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"prompt": "a", "answer": "b"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(TaskError, match=r"rows\.jsonl line 2: "):
        read_rows(rows)


def test_no_rows_and_a_missing_file_are_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="nothing to train on"):
        warm_up(model_dir, tmp_path / "out", rows=[])
    with pytest.raises(TaskError, match="cannot be read"):
        read_rows(tmp_path / "nowhere.jsonl")


def test_tokenizer_without_an_end_is_refused(model_dir: Path) -> None:
    class Endless(Tokenizer):
        def __init__(self, assets: Path) -> None:
            super().__init__(assets)
            self.stop_ids = ()

    with pytest.raises(PolicyError, match="no end-of-sequence token"):
        RowEncoder(model_dir, Endless(model_dir))

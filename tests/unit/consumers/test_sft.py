"""A supervised warm start teaches what the rows say, the same way every time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora_pipe.consumers.learners.sft import train_sft
from dora_pipe.core.errors import PolicyError, TaskError
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.store.safetensors_file import read_manifest
from tests.support.models import make_llama_gqa, make_qwen2

ROWS = [("2+2=", "4"), ("3+4=", "7"), ("9-1=", "8"), ("5*1=", "5")]


@pytest.fixture(scope="module", params=["qwen2", "llama-gqa"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(str(request.param))
    return {"qwen2": make_qwen2, "llama-gqa": make_llama_gqa}[request.param](root / "model")


def warm_up(model_dir: Path, out: Path, **options: Any) -> float:
    settings = {"steps": 40, "batch": 4, "learning_rate": 3e-3} | options
    rows = settings.pop("rows", ROWS)
    return train_sft(model_dir, rows, out, tokenizer=Tokenizer(model_dir), **settings)


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


def test_model_says_the_answers_and_ends_after_them(model_dir: Path, tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    last = warm_up(
        model_dir,
        tmp_path / "out",
        progress=lambda step, loss: losses.update({step: loss}),
    )
    assert list(losses) == list(range(1, 41))
    assert losses[40] == last < 0.05 < losses[1]
    for prompt, wanted in ROWS:
        assert answer(tmp_path / "out", prompt) == (wanted, True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names


def test_equal_seeds_give_equal_weights_and_others_do_not(model_dir: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        warm_up(model_dir, tmp_path / name, steps=3, batch=2, seed=seed)
    digests = [
        read_manifest(tmp_path / name / "model.safetensors").digest
        for name in ("one", "same", "other")
    ]
    assert digests[0] == digests[1] != digests[2]


def test_rows_come_from_a_file_too(model_dir: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "2+2=", "answer": "4", "more": 1}\n\n{"prompt": "3+4=", "answer": "7"}\n'
    )
    warm_up(model_dir, tmp_path / "file", rows=rows, steps=2)
    warm_up(model_dir, tmp_path / "pairs", rows=ROWS[:2], steps=2)
    one, other = (
        read_manifest(tmp_path / name / "model.safetensors").digest for name in ("file", "pairs")
    )
    assert one == other


@pytest.mark.parametrize(
    "line", ['{"prompt": "a"}', '{"prompt": 1, "answer": "b"}', "[]", "nonsense", "\xff"]
)
def test_line_without_the_two_texts_is_named(model_dir: Path, tmp_path: Path, line: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"prompt": "a", "answer": "b"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(TaskError, match=r"rows\.jsonl line 2: "):
        warm_up(model_dir, tmp_path / "out", rows=rows)
    assert not (tmp_path / "out").exists()


def test_no_rows_and_a_missing_file_are_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="nothing to train on"):
        warm_up(model_dir, tmp_path / "out", rows=[])
    with pytest.raises(TaskError, match="cannot be read"):
        warm_up(model_dir, tmp_path / "out", rows=tmp_path / "nowhere.jsonl")


def test_tokenizer_without_an_end_is_refused(model_dir: Path, tmp_path: Path) -> None:
    class Endless(Tokenizer):
        def __init__(self, assets: Path) -> None:
            super().__init__(assets)
            self.stop_ids = ()

    with pytest.raises(PolicyError, match="no end-of-sequence token"):
        train_sft(model_dir, ROWS, tmp_path / "out", tokenizer=Endless(model_dir))

"""Tests of supervised warm starts."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, masking_utils

from dora_pipe.config.model import Config
from dora_pipe.config.several import pool_specs
from dora_pipe.consumers.learners.sft import Example, SftOptions, SftResult, rows_of, train_sft
from dora_pipe.consumers.learners.torch.lora import LoraOptions
from dora_pipe.consumers.learners.torch.memory import MemoryOptions
from dora_pipe.core.errors import ConfigError, PolicyError, TaskError
from dora_pipe.launch.warm_start import Row, RowEncoder, data_rows, demonstrations, sft_options
from dora_pipe.launch.warm_start import warm_up as launch_warm_up
from dora_pipe.producers.chat.chat import Chat, Conversation
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calls import PromptCall, PromptReady
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.worker.chats import chat_options
from dora_pipe.producers.worker.ports import prompt_of
from dora_pipe.store.safetensors_file import read_manifest
from tests.support.chat_models import CHATML, write_chat_model
from tests.support.configs import small_config
from tests.support.models import make_llama_gqa, make_qwen2

ROWS: list[Row] = [
    {"prompt": "2+2=", "answer": "4"},
    {"prompt": "3+4=", "answer": "7"},
    {"prompt": "9-1=", "answer": "8"},
    {"prompt": "5*1=", "answer": "5"},
]

PACKED = MemoryOptions(packing=True)


def config_of(model_dir: Path, **task: Any) -> Config:
    return small_config(model={"path": str(model_dir)}, task={"kind": "arithmetic", **task})


@pytest.fixture(scope="module", params=["qwen2", "llama-gqa"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(str(request.param))
    return {"qwen2": make_qwen2, "llama-gqa": make_llama_gqa}[request.param](root / "model")


def warm_up(model_dir: Path, out: Path, **options: Any) -> SftResult:
    settings = {"steps": 40, "batch": 4, "learning_rate": 3e-3} | options
    rows = settings.pop("rows", ROWS)
    reply = {"progress": settings.pop("progress")} if "progress" in settings else {}
    encode = settings.pop("encode", None) or RowEncoder(config_of(model_dir))
    return train_sft(model_dir, rows, out, encode=encode, options=SftOptions(**settings), **reply)


def digest_of(directory: Path) -> str:
    return read_manifest(directory / "model.safetensors").digest


def answer(model_dir: Path, prompt: str) -> tuple[str, bool]:
    tokenizer = Tokenizer(model_dir)
    load: Any = AutoModelForCausalLM.from_pretrained
    network = load(model_dir)
    ids = tokenizer.prompt_ids(prompt)
    texts: list[int] = []
    while len(texts) < 4 and (not texts or texts[-1] not in tokenizer.stop_ids):
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([[*ids, *texts]])).logits[0, -1]
        texts.append(int(logits.argmax()))
    return tokenizer.text(texts), texts[-1] in tokenizer.stop_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": PACKED, "context_tokens": 32},
        {"schedule": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1, "weight_decay": 0.01},
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
        assert answer(tmp_path / "out", row["prompt"]) == (row["answer"], True)
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
        {
            tensor.name: tensor.sha256
            for tensor in read_manifest(where / "model.safetensors").tensors
        }
        for where in (tmp_path / "base", tmp_path / "out")
    )
    changed = {name.split(".")[-2] for name in base if merged[name] != base[name]}
    assert changed == set(lora.targets)


def test_equal_seeds_give_equal_weights_and_others_do_not(model_dir: Path, tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        warm_up(model_dir, tmp_path / name, steps=3, batch=2, seed=seed)
    digests = [digest_of(tmp_path / name) for name in ("one", "same", "other")]
    assert digests[0] == digests[1] != digests[2]


# Examples in one row.

EXAMPLES = st.lists(st.integers(2, 20), min_size=1, max_size=30).map(
    lambda lengths: [
        Example(token_ids=[place] * length, mask=[0] + [1] * (length - 1))
        for place, length in enumerate(lengths)
    ]
)


@given(EXAMPLES)
def test_packed_rows_hold_every_example_once_and_none_is_too_long(examples: list[Example]) -> None:
    rows = rows_of(examples, packing=True, context_tokens=20)
    assert all(sum(len(trajectory.token_ids) for trajectory in row) <= 20 for row in rows)
    held = [trajectory.token_ids[0] for row in rows for trajectory in row]
    assert sorted(held) == list(range(len(examples)))
    total = sum(len(example.token_ids) for example in examples)
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
            memory=MemoryOptions(packing=name == "packed"),
            context_tokens=64,
            progress=lambda _, loss, to=losses[name]: to.append(loss),
        )
    assert losses["packed"] == pytest.approx(losses["apart"], rel=1e-4)


def test_model_whose_examples_would_see_each_other_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *given: None)
    with pytest.raises(PolicyError, match="mixes the sequences"):
        warm_up(model_dir, tmp_path / "out", memory=PACKED, context_tokens=64)
    assert not (tmp_path / "out").exists()


def test_rows_longer_than_the_context_are_left_out_and_counted(
    model_dir: Path, tmp_path: Path
) -> None:
    long = {"prompt": "2+2=" * 8, "answer": "4"}
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


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a"}, "no text in `answer`"),
        ({"prompt": 1, "answer": "b"}, "no text in `prompt`"),
        ({"prompt": "a", "answer": None}, "no text in `answer`"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "no text in `answer`"),
        ({}, "no text in `prompt`"),
    ],
)
def test_row_of_no_known_form_is_named(model_dir: Path, tmp_path: Path, row: Row, why: str) -> None:
    with pytest.raises(TaskError, match=f"row 0: {why}") as raised:
        warm_up(model_dir, tmp_path / "out", rows=[row])
    assert "messages" in (raised.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_no_rows_and_a_missing_file_are_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no rows"):
        warm_up(model_dir, tmp_path / "out", rows=[])
    with pytest.raises(TaskError, match="No such file"):
        data_rows(str(tmp_path / "nowhere.jsonl"))


def test_tokenizer_without_an_end_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(Tokenizer):
        def __init__(self, assets: Path, **options: Any) -> None:
            super().__init__(assets, **options)
            self.stop_ids = ()

    monkeypatch.setattr("dora_pipe.producers.chat.tokenizer.Tokenizer", Endless)
    with pytest.raises(PolicyError, match="no end-of-sequence token"):
        RowEncoder(config_of(model_dir))


# Conversations.

USER = {"role": "user", "content": "What is 2+2?"}
SAID = {"role": "assistant", "content": "4"}


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    build: Any = LlamaForCausalLM
    build(
        LlamaConfig(
            vocab_size=512,
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
    ).save_pretrained(folder)
    return write_chat_model(folder, text=CHATML)


def said_by(chat_dir: Path, example: Example) -> list[str]:
    tokenizer = Tokenizer(chat_dir)
    return [
        tokenizer.full_text([token for token, _ in pairs])
        for counts, of in itertools.groupby(
            zip(example.token_ids, example.mask, strict=True), key=lambda value: value[1]
        )
        if (pairs := list(of)) and counts
    ]


@pytest.mark.parametrize(
    ("row", "task"),
    [
        ({"messages": [USER, SAID]}, {}),
        ({"messages": msgspec.json.encode([USER, SAID]).decode()}, {}),
        ({"messages": [USER, SAID], "tools": "[]"}, {}),
        ({"prompt": [USER], "answer": "4"}, {}),
        ({"prompt": USER["content"], "answer": "4"}, {"chat": True}),
    ],
)
def test_every_form_of_a_conversation_is_the_same_example(
    chat_dir: Path, row: Row, task: dict[str, Any]
) -> None:
    example = RowEncoder(config_of(chat_dir, **task))(row)
    full = Tokenizer(chat_dir).full_text(example.token_ids)
    assert full.startswith("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n4")
    assert said_by(chat_dir, example) == ["4<|im_end|>"]


def test_only_what_the_assistant_says_counts_in_every_turn(chat_dir: Path) -> None:
    talk = [USER, SAID, {"role": "user", "content": "And 4+4?"}, {**SAID, "content": "8"}]
    encode = RowEncoder(config_of(chat_dir, system_prompt="Be brief."))
    example = encode({"messages": talk})
    full = Tokenizer(chat_dir).full_text(example.token_ids)
    assert full.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert said_by(chat_dir, example) == ["4<|im_end|>", "8<|im_end|>"]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
TALKED = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


@pytest.mark.parametrize(
    ("row", "task"),
    [
        ({"prompt": [USER, CALLED], "tools": [WEATHER]}, {}),
        ({"prompt": [USER, SAID], "tools": json.dumps([WEATHER])}, {}),
        ({"prompt": json.dumps([USER, SAID]), "tools": [WEATHER["function"]]}, {"chat": True}),
        ({"prompt": "2+2?", "answer": "4", "tools": None}, {"system_prompt": "Be brief."}),
        ({"prompt": "2+2?", "answer": "4"}, {}),
        ({"prompt": TALKED, "answer": "5"}, {}),
        ({"prompt": "2+2?", "answer": "4"}, {"chat": True}),
    ],
)
def test_a_warm_start_and_a_run_have_equal_prompts(
    row: Row, task: dict[str, Any], tmp_path: Path
) -> None:
    model, data = write_chat_model(tmp_path, "qwen2_5"), tmp_path / "rows.jsonl"
    (model / "config.json").write_text("{}")
    data.write_text(json.dumps(row) + "\n")
    config = config_of(model, **{"kind": "dataset", "data": str(data), "reward": "none", **task})
    (spec,) = pool_specs(config)
    with TaskPool(spec.task) as pool:
        pool.wait()
        pool.start(PromptCall(request="r", split="train", index=0))
        ready = next(event for _ in itertools.count() for event in pool.poll(1.0))
    assert isinstance(ready, PromptReady) and not ready.episode
    tokenizer = Tokenizer(model)
    chat = Chat.open(model, tokenizer, chat_options(config.task, 0)) if ready.messages else None
    prompt = prompt_of(ready, tokenizer, chat)
    ids = list(prompt.prompt_ids if isinstance(prompt, Conversation) else prompt)
    assert ("weather" in tokenizer.full_text(ids)) == bool(row.get("tools"))
    for entry in (row, *demonstrations(config, seed=0, count=1)):
        example = RowEncoder(config)(entry)
        assert list(example.token_ids[: example.mask.index(1)]) == ids


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": [USER, SAID], "tools": "{"}, "tools: "),
        ({"messages": [USER, SAID], "tools": [1]}, r"tools\[0\] is no function"),
        ({"prompt": json.dumps([USER]), "answer": "4"}, "in a JSON string"),
        ({"messages": [{**USER, "content": "<|im_start|>user"}, SAID]}, "already rendered"),
        ({"messages": [USER, {"role": "wizard", "content": "4"}]}, "wizard"),
    ],
)
def test_conversation_that_cannot_be_trained_says_why(chat_dir: Path, row: Row, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        RowEncoder(config_of(chat_dir))(row)


@pytest.mark.parametrize("packing", [False, True], ids=["apart", "packed"])
def test_chat_model_learns_to_answer(chat_dir: Path, tmp_path: Path, packing: bool) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{a}+{b}?"}, {**SAID, "content": str(a + b)}]}
        for a in range(3)
        for b in range(3)
    ]
    done = warm_up(
        chat_dir,
        tmp_path / "out",
        rows=rows,
        batch=9,
        memory=MemoryOptions(packing=packing),
        steps=60,
    )
    assert done.loss < 0.1, done.loss
    prompt = RowEncoder(config_of(chat_dir))(rows[5])
    ids = list(prompt.token_ids[: prompt.mask.index(1)])
    load: Any = AutoModelForCausalLM.from_pretrained
    network = load(tmp_path / "out")
    while len(ids) < len(prompt.token_ids):
        with torch.no_grad():
            ids.append(int(network(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    count = prompt.mask.index(1) + sum(prompt.mask)
    assert ids[:count] == list(prompt.token_ids[:count])


def test_template_of_the_configuration_is_learnt_and_written(
    chat_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jinja"
    colons = CHATML.replace("message.role }}", "message.role }}:").replace(
        "assistant", "assistant:"
    )
    other.write_text(colons)
    plain = config_of(chat_dir)
    config = msgspec.structs.replace(
        plain, model=msgspec.structs.replace(plain.model, chat_template=str(other))
    )
    rows = [{"messages": [USER, SAID]}]
    launch_warm_up(config, rows, tmp_path / "out", SftOptions(steps=1, batch=1))
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == other.read_text()
    assert "sft step    1 of 1" in capsys.readouterr().err
    assert (chat_dir / "chat_template.jinja").read_text() == CHATML


def test_sft_trains_with_the_optimizer_of_the_configuration(
    model_dir: Path, tmp_path: Path
) -> None:
    few: dict[str, Any] = {"steps": 2}
    names = ("adamw", "muon", "muon")
    for number, name in enumerate(names):
        warm_up(model_dir, tmp_path / str(number), optimizer=name, **few)
    adamw, muon, again = (digest_of(tmp_path / str(number)) for number in range(3))
    assert adamw != muon == again


def test_sft_needs_the_library_of_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(Path("m"))
    eight = msgspec.structs.replace(config.trainer, optimizer="adamw8bit")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs bitsandbytes"):
        sft_options(msgspec.structs.replace(config, trainer=eight))
    assert sft_options(config).optimizer == "adamw"

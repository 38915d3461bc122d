"""The examples in the repository are what the documents say they are."""

import asyncio
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.load import load_config
from dora_pipe.launch.examples import EOS, write_word_tokenizer
from dora_pipe.orchestrator.rows import RowStats
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.data.prepare import open_rows
from dora_pipe.producers.data.spec import DataSpec
from dora_pipe.producers.tasks import calculator
from dora_pipe.producers.tasks.port import Reward
from dora_pipe.producers.tasks.registry import dataset_digest, open_task

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
LLAMA = EXAMPLES / "jsonl-llama"


def table(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


NEED_MORE = ("chat-math", "mcp", "openenv", "reasoning-gym", "verifiers")
"""Data that are made, servers, packages: test_chat_math.py, test_examples_of_others.py and
test_verifiers_example.py in tests/slow run them."""

WITH_DATA = sorted(path for path in EXAMPLES.rglob("*.toml") if path.parent.name not in NEED_MORE)
"""Those whose data are in the repository."""


@pytest.mark.parametrize("path", WITH_DATA, ids=lambda path: path.name)
def test_every_example_is_a_sound_configuration_whose_task_opens(path: Path) -> None:
    config = load_config(path, ())
    task = open_task(config.task)
    assert dataset_digest(task, "train")[1] > 0
    assert dataset_digest(task, "eval")[1] >= config.evaluation.prompts > 0


@pytest.mark.parametrize("name", ["arithmetic", "calculator"])
def test_examples_of_built_in_tasks_are_what_init_writes(name: str) -> None:
    assert table(EXAMPLES / f"{name}.toml") == table(ROOT / "launch" / "templates" / f"{name}.toml")


def test_no_word_of_the_evaluation_data_is_trained_on() -> None:
    train, evaluation = (
        {row["prompt"] for row in open_rows(DataSpec(sources=(f"{LLAMA}/data/{split}.jsonl",)))}
        for split in ("train", "eval")
    )
    assert (len(train), len(evaluation)) == (900, 64)
    assert not train & evaluation


def test_data_is_what_its_program_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LLAMA))
    import make_data  # type: ignore[import-not-found]

    monkeypatch.setattr(make_data, "FOLDER", tmp_path)
    make_data.main()
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_text() == (LLAMA / "data" / name).read_text()
    sys.modules.pop("make_data")


@pytest.mark.parametrize(
    ("text", "value", "exact"),
    [
        ("cba", 1.0, 1.0),
        (" cba\n", 1.0, 1.0),
        ("cbx", 1 / 3, 0.0),
        ("", 0.0, 0.0),
        ("cbacba", 0.25, 0),
    ],
)
def test_reward_of_the_example(
    monkeypatch: pytest.MonkeyPatch, text: str, value: float, exact: float
) -> None:
    monkeypatch.syspath_prepend(str(LLAMA))
    task = open_task(load_config(LLAMA / "config.toml", ()).task)
    row = {"prompt": "turn abc around:", "answer": "cba"}
    reward = task.reward(row, text, [text])
    assert isinstance(reward, Reward)
    assert reward.value == pytest.approx(value)
    assert reward.raw == exact
    sys.modules.pop("rewards")


@pytest.mark.pure
@pytest.mark.slow
def test_model_of_the_example_loads_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.syspath_prepend(str(LLAMA))
    import make_model  # type: ignore[import-not-found]

    vocabulary = make_model.make_tokenizer(tmp_path)
    make_model.make_model(tmp_path, vocabulary)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    row = open_rows(DataSpec(sources=(f"{LLAMA}/data/train.jsonl",)))[0]
    ids = tokenizer(row["prompt"], return_tensors="pt")
    assert ids["input_ids"][0, 0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids["input_ids"][0], skip_special_tokens=True) == row["prompt"]
    made = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert made.shape[1] == ids["input_ids"].shape[1] + 4


def test_python_in_the_guide_runs_and_does_what_it_says() -> None:
    """Every block of docs/tasks.md is run; the classes in them are used as the text says."""
    guide = (ROOT / "docs" / "tasks.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    scores = []
    for block in blocks:
        exec(block.replace("    ...\n", ""), names)
        scores.append(names["score"])
    row = {"prompt": "a", "answer": "b"}
    assert scores[0](row, " b\n") == 1.0
    assert scores[1](row, "bb").parts == {"exact": 0.0}
    seen = [RowStats(), *(RowStats(groups=2, recent=(one, one)) for one in (0.0, 0.5, 1.0))]
    assert names["weights"](seen, 3) == pytest.approx([0.27, 0.02, 0.27, 0.02])
    squares = names["Squares"](largest=9)
    assert [row["n"] for row in squares.rows("eval")] == [1, 3, 5, 7]
    assert squares.prompt({"n": 3}) == "3 squared is"
    assert squares.reward({"n": 3}, " 9", []) == 1.0
    world = names["GuessTask"]().environment({"secret": 4})
    world.reset({"secret": 4})
    assert [world.step(text).text for text in ("3", "x", "9", "4")] == [
        "higher",
        "higher",
        "lower",
        "",
    ]
    assert world.step("4").done
    shell = names["Shell"]()
    assert asyncio.run(shell.reset({"question": "where?", "answer": "here"})) == "where?"
    assert [asyncio.run(shell.step(text)).done for text in ("there", " here ")] == [False, True]


def test_control_tokens_of_the_calculators_older_demonstrations_are_parsed(tmp_path: Path) -> None:
    config = load_config(EXAMPLES / "calculator.toml", ["task.options.tools=false"])
    write_word_tokenizer(tmp_path, calculator.WORDS)
    tokenizer = Tokenizer(tmp_path, special_tokens="parse")
    pairs = open_task(config.task).demonstrations(3, 40)
    later = [before for before, _ in pairs if EOS in before]
    assert later
    for before in later:
        ids = tokenizer.prompt_ids(before)
        assert sum(one in tokenizer.stop_ids for one in ids) == before.count(EOS)


def test_train_your_own_of_the_readme_is_the_example_with_a_chat_model() -> None:
    """Its keys are those of the example's file, its commands those that the example's page has."""
    example = EXAMPLES / "chat-math"
    readme = (ROOT / "README.md").read_text().split("## Train your own")[1].split("\n## ")[0]
    (said,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    whole = table(example / "config.toml")
    for section, keys in tomllib.loads(said).items():
        assert keys.items() <= whole[section].items()
    commands, told = (
        set(re.findall(r"^\$ (.*?)(?:  #.*)?$", text.replace("\\\n", " "), re.MULTILINE))
        for text in (readme, (example / "README.md").read_text())
    )
    assert {one for one in told if " show " not in one} <= {one.strip() for one in commands}

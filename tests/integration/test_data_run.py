"""A whole run on conversations in Parquet: the system's message, the answer of the data, a share
held out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.control import RunStarted
from tests.support.data_files import TYPED
from tests.support.user_run import assert_clean, call, call_here, facts, furnish, steps

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TASK = """
[task]
kind = "dataset"
data = "rows.parquet"
columns = {prompt = "conversations"}
filter = "level > 0"
eval_share = 0.3
system_prompt = "be brief"
reward = "judge:score"
[model]
path = "model"
chat_template = "own.jinja"
"""
ROWS = [
    {
        "level": number % 3,
        "conversations": [
            {"from": "human", "value": f"say {letter}{number}"},
            {"from": "gpt", "value": letter},
        ],
    }
    for number in range(12)
    for letter in "abcd"
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = furnish(tmp_path_factory.mktemp("data"))
    (directory / "own.jinja").write_text(TEMPLATE)
    TYPED["rows.parquet"](directory / "rows.parquet", ROWS)
    text = (directory / "config.toml").read_text()
    before, _, rest = text.partition("[model]")
    rest = "[sampling]" + rest.partition("[sampling]")[2]
    (directory / "config.toml").write_text(before + TASK + rest)
    assert call(directory, "run", "config.toml") == 0, (directory / "said").read_text()
    return directory


def test_run_on_conversations_is_clean_and_its_rewards_are_found_again(directory: Path) -> None:
    assert steps(directory, "tiny") == [0, 1, 2]
    assert_clean(directory, "tiny")
    text = (directory / "said").read_text()
    assert "step    2  reward" in text
    assert "evaluation of version 3" in text
    started = next(fact for fact in facts(directory, "tiny") if isinstance(fact, RunStarted))
    assert started.dataset_rows + started.eval_rows == 32
    assert 4 <= started.eval_rows <= 16
    assert call_here(directory, "rescore", "tiny") == 0
    assert "trajectories as recorded" in (directory / "said").read_text()
    with opened(str(directory / "runs" / "tiny")) as run:
        assert run.config.task.columns == {"prompt": "conversations"}


def test_its_policy_is_exported_and_loads(directory: Path) -> None:
    assert call_here(directory, "export", "policy", "tiny", "3", "trained") == 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory / "trained")
    model: Any = AutoModelForCausalLM.from_pretrained(directory / "trained")
    ids = tokenizer("say a: ", return_tensors="pt")["input_ids"]
    generated = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False).tolist()
    assert len(generated[0]) > ids.shape[1]

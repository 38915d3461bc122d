"""What `init`, `sft` and the demo start from: a configuration and a small random model for each
built-in task, and a warm start on demonstrations.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from dora_pipe.config.model import Config
from dora_pipe.core.console import say
from dora_pipe.core.errors import TaskError
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.producers.tasks.vocabulary import (
    BOS,
    EOS,
    PAD,
    SPECIAL,
    vocabulary_size,
    write_word_tokenizer,
)

HIDDEN = 192
LAYERS = 2
HEADS = 6
"""Of 32 each: of the sizes that vLLM's kernels for CPUs have, the smallest."""


CONTEXT_TOKENS: Final = 256

TALK_EVERY: Final = 40
"""Steps of a warm start between two lines of talk."""


def example_config(task: str, engine: str = "torch") -> str:
    """The text of an example's configuration file."""
    text = example_file(task).read_text()
    section = "[workers]\n"
    assert section in text, f"the example of {task} has no {section}"
    return text if engine == "torch" else text.replace(section, f'{section}engine = "{engine}"\n')


def example_file(task: str) -> Path:
    """Where it lies in the package."""
    return Path(__file__).parent / "templates" / f"{task}.toml"


def make_model(
    directory: Path, task: str, *, context_tokens: int = CONTEXT_TOKENS, seed: int = 0
) -> int:
    """Write a random Llama of about 1 200 000 parameters with the words of a built-in task; returns
    their number.

    hidden 192, 2 layers, 6 heads, intermediate 768: it learns the built-in tasks on one core.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from dora_pipe.producers.tasks import arithmetic, calculator

    words = {"arithmetic": arithmetic.WORDS, "calculator": calculator.WORDS}[task]
    quiet: Any = logging.disable_progress_bar
    quiet()
    torch.manual_seed(seed)
    build: Any = LlamaForCausalLM
    model = build(
        LlamaConfig(
            vocab_size=vocabulary_size(words),
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=context_tokens,
            tie_word_embeddings=False,
            pad_token_id=SPECIAL.index(PAD),
            bos_token_id=SPECIAL.index(BOS),
            eos_token_id=SPECIAL.index(EOS),
        )
    ).float()
    model.save_pretrained(directory)
    write_word_tokenizer(directory, words, context_tokens=context_tokens)
    return sum(weights.numel() for weights in model.parameters())


def warm_up(
    model: Path,
    rows: Sequence[tuple[str, str]] | Path,
    out: Path,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    threads: int,
    special_tokens: Literal["text", "parse"] = "text",
) -> None:
    """Train and say how it goes. Raises PolicyError, TaskError, UsageError."""
    from dora_pipe.consumers.learners.sft import train_sft
    from dora_pipe.producers.worker.tokenizer import Tokenizer

    def progress(step: int, loss: float) -> None:
        if step % TALK_EVERY == 0 or step == steps:
            say(f"sft step {step:>4} of {steps}  loss {loss:.3f}")

    train_sft(
        model,
        rows,
        out,
        tokenizer=Tokenizer(model, special_tokens=special_tokens),
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        threads=threads,
        progress=progress,
    )


def demonstrations(config: Config, *, seed: int, count: int) -> Sequence[tuple[str, str]]:
    """(prompt, answer) pairs of the configuration's task. Raises TaskError if it makes none."""
    sys.path.insert(0, config.task.directory)
    try:
        return open_task(config.task).demonstrations(seed, count)
    except NotImplementedError:
        raise TaskError(
            f"task {config.task.kind} makes no demonstrations", hint="give them with --data"
        ) from None
    finally:
        sys.path.remove(config.task.directory)

"""Reject a model that a run cannot use, before any write."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from dora_pipe.config.model import Config
from dora_pipe.config.several import PoolSpec
from dora_pipe.core.errors import ConfigError, PolicyError
from dora_pipe.core.system.console import say
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.template import FILE, read_template
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.base import need_positions
from dora_pipe.producers.engines.registry import check_model as check_engine_model
from dora_pipe.producers.engines.torch.causal_lm import EXPERTS
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.worker.chats import chats_of
from dora_pipe.store.model_dir import embedding_rows, read_config, unassigned_ids

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_model(config: Config, engines: Iterable[str], directory: Path) -> None:
    """Check that a model directory has a tokenizer and suits these engines.

    Raises PolicyError, and ConfigError for an unsupported key.
    """
    check_engine_model(config, engines, directory)
    _need_experts(config, directory)
    need_positions(directory, config.workers.max_model_len)
    check_tokenizer(directory)


def unassigned_note(directory: Path) -> str:
    """Return a note about embedding rows without a token; empty without any."""
    ids = unassigned_ids(directory) if _tokenizers_installed() else ()
    if not ids:
        return ""
    return (
        f"{len(ids)} of the model's {embedding_rows(read_config(directory))} embedding rows have no"
        f" token in its tokenizer (ids {ids[0]} to {ids[-1]}): they are never sampled or trained"
    )


def check_tokenizer(directory: Path) -> None:
    """Raise PolicyError if the tokenizer is missing or has ids beyond the embedding."""
    rows = embedding_rows(read_config(directory))
    if not has_tokenizer(directory):
        raise PolicyError(
            f"{directory} has no tokenizer",
            hint="save it with `save_pretrained` of a fast tokenizer, which writes tokenizer.json",
        )
    if not (directory / TOKENIZER_FILES[0]).is_file() or not _tokenizers_installed():
        return  # transformers would convert it, which takes seconds
    size = Tokenizer(directory).size
    if rows is not None and size > rows:
        raise PolicyError(
            f"{directory}: the tokenizer has token ids up to {size - 1}, but the model's "
            f"embedding has {rows} rows",
            hint="use the model's own tokenizer, or save the model again after "
            f"`model.resize_token_embeddings({size})`",
        )


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def check_chat(spec: PoolSpec, pool: TaskPool, directory: Path) -> dict[str, Chat] | None:
    """Return the chats of a task's sources; None without a tokenizer.

    Raises ConfigError or PolicyError if the chat template cannot render the prompts. Reports a
    template that cannot parse an agent's tool calls.
    """
    if not _tokenizers_installed():
        return None
    opened, tokenizer = [(spec, pool)], Tokenizer(directory)
    chats = chats_of(opened, time.time_ns(), directory, tokenizer, stop=lambda: False)
    unread = (
        chat.calls_unread and chat.template_renderer.features.tools for chat in chats.values()
    )
    if spec.task.has_agent and any(unread):
        say(
            "note: no parser for tool calls of this chat template: the agent gets them as text"
            " (hint: set task.tool_parser, see docs/data.md)"
        )
    return chats


@contextmanager
def templated(config: Config, model: Path) -> Iterator[Path]:
    """Yield the model's directory with the template of `model.chat_template`, if that is set."""
    if not config.model.chat_template:
        yield model
        return
    text = read_template(Path(config.model.chat_template))
    with tempfile.TemporaryDirectory() as folder:
        for file in model.iterdir():
            if file.is_file() and file.name != FILE:
                Path(folder, file.name).symlink_to(file.resolve())
        Path(folder, FILE).write_text(text)
        yield Path(folder)


def _tokenizers_installed() -> bool:
    return importlib.util.find_spec("tokenizers") is not None


def _need_experts(config: Config, directory: Path) -> None:
    of_model = read_config(directory)
    experts = next((int(of_model[key]) for key in EXPERTS if of_model.get(key)), 0)
    dealt = config.trainer.expert_parallel_size
    asked = {"router_aux_loss": config.trainer.router_aux_loss, "expert_parallel_size": dealt - 1}
    odd = [key for key, value in asked.items() if value]
    if odd and not experts:
        raise ConfigError(
            f"trainer.{odd[0]}: {directory} is not a mixture of experts", hint="remove the key"
        )
    if experts % dealt:
        raise ConfigError(
            f"trainer.expert_parallel_size: {experts} experts cannot be split over {dealt} ranks",
            hint="choose a divisor of both",
        )

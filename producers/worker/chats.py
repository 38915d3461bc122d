"""Chat rendering for each source of a run; the first row of a task tells whether its prompts are
messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from dora_pipe.config.model import Config, Task
from dora_pipe.config.several import PoolSpec, pool_specs
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.chat.chat import Chat, ChatOptions
from dora_pipe.producers.chat.template import find_templates
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calls import Forget, PromptCall, PromptReady, TaskFailed
from dora_pipe.producers.tasks.messages import NoAnswer
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.task import Split
from dora_pipe.schemas.wire import sha256_hex

POLL_S: Final = 0.25

_FIRST: Final = "first-prompt"

Pools = Sequence[tuple[PoolSpec, TaskPool]]


def chats_of(
    pools: Pools,
    started_ns: int,
    assets: Path,
    tokenizer: Tokenizer,
    *,
    stop: Callable[[], bool],
) -> dict[str, Chat]:
    """Return the chat of every source whose prompts are messages.

    Raises ConfigError or PolicyError if the model has no suitable chat template.
    """
    chats: dict[str, Chat] = {}
    for spec, pool in pools:
        chat = _chat_of(spec, pool, started_ns, assets, tokenizer, stop)
        if chat is not None:
            chats |= dict.fromkeys(spec.sources, chat)
    return chats


def recorded_chats(
    config: Config,
    started_ns: int,
    assets: Path,
    tokenizer: Tokenizer,
    digests: Collection[str],
) -> dict[str, Chat]:
    """Return the chats of a recorded run by source: the most tasks whose combined digest is in
    `digests`, else all tasks."""
    if not digests:
        return {}
    opened = [
        dict.fromkeys(
            spec.sources, Chat.open(assets, tokenizer, chat_options(spec.task, started_ns))
        )
        for spec in pool_specs(config)
    ]
    for size in range(len(opened), 0, -1):
        for chosen in itertools.combinations(opened, size):
            chats = _joined(chosen)
            if digest_of(chats) in digests:
                return chats
    return _joined(opened)


def _joined(chats: Sequence[Mapping[str, Chat]]) -> dict[str, Chat]:
    return {source: chat for source_chats in chats for source, chat in source_chats.items()}


def digest_of(chats: Mapping[str, Chat]) -> str:
    """Return the combined digest; empty without chats."""
    digests = list(dict.fromkeys(chat.digest for chat in chats.values()))
    if len(digests) <= 1:
        return "".join(digests)
    return sha256_hex("\n".join(digests).encode())


def chat_options(task: Task, started_ns: int) -> ChatOptions:
    """Read the chat keys of a task; `started_ns` is the current time for its template."""
    return ChatOptions(
        kwargs=task.chat_template_kwargs,
        renderer=task.renderer,
        tool_parser=task.tool_parser,
        rewritten_history=task.rewritten_history,
        parse=task.special_tokens == "parse",
        directory=task.directory,
        now_ns=started_ns,
    )


def _chat_of(
    spec: PoolSpec,
    pool: TaskPool,
    started_ns: int,
    assets: Path,
    tokenizer: Tokenizer,
    stop: Callable[[], bool],
) -> Chat | None:
    if spec.task.has_agent:
        return agent_chat(spec.task, started_ns, assets, tokenizer)
    split: Split = "train" if spec.sources[0].startswith("train") else "eval"
    ready = _first_prompt(pool, split, stop)
    if ready is None or not ready.messages:
        return None
    chat = Chat.open(assets, tokenizer, chat_options(spec.task, started_ns))
    chat.check(several_turns=ready.episode, tools=bool(ready.tools))
    try:
        chat.start(ready.messages, ready.tools)
    except TaskError as error:
        raise ConfigError(f"the first row's prompt: {error.message}", hint=error.hint) from None
    return chat


def agent_chat(task: Task, started_ns: int, assets: Path, tokenizer: Tokenizer) -> Chat | None:
    """Return the chat for an agent's calls; None if agents must send token ids."""
    if not find_templates(assets):
        return None
    return Chat.open(assets, tokenizer, chat_options(task, started_ns))


def _first_prompt(pool: TaskPool, split: Split, stop: Callable[[], bool]) -> PromptReady | None:
    """Return the first row's prompt; None if the task's code fails. Raises ConfigError for an
    invalid prompt."""
    pool.start(PromptCall(request=_FIRST, split=split, index=0))
    while not stop():
        for event in pool.poll(POLL_S):
            if event.request == _FIRST:
                pool.start(Forget(request=_FIRST))
                if isinstance(event, TaskFailed) and event.error == NoAnswer.__name__:
                    raise ConfigError(f"the first row's prompt: {event.message}")
                return event if isinstance(event, PromptReady) else None
    return None

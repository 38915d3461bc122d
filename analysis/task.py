"""Open the task of a run on this machine; prints differences to the run's workers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.config.model import Config, RewardUse, Task
from dora_pipe.config.several import pool_specs, with_each_task
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import say
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.ledger.database import Catalogue
from dora_pipe.observe.lineage import first_record
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.registry import check_data, check_scoring, reward_digest_of
from dora_pipe.producers.worker.chats import digest_of, recorded_chats
from dora_pipe.producers.worker.ports import TaskPorts
from dora_pipe.producers.worker.role import task_ports
from dora_pipe.schemas.control import RunStarted, WorkerJoined

NAMED: Final = re.compile(r"([A-Za-z0-9_-]+)=(.+)", re.DOTALL)
"""`--reward` of one task; inline tables contain `=` too."""

INLINE_HINT: Final = (
    '{use = "module:function", weight = 0.2, group = true}, or a list: docs/rewards.md'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTask:
    ports: TaskPorts
    reward_digest: str
    recorded: frozenset[str]
    stopped: Callable[[Sequence[int]], bool]
    """Reports whether a turn ended by a stop token or string."""
    together: frozenset[str]
    """Sources with group scoring here."""


@contextmanager
def opened_task(run: OpenRun, config: Config, *, other_rewards: bool = False) -> Iterator[OpenTask]:
    """Start the task; `other_rewards` need not score groups. Raises TaskError, ConfigError,
    InvariantBroken for other data than the run's."""
    started = first_record(run.bus, run.topics)
    assets = run.policies.assets(started.assets_digest)
    tokenizer = Tokenizer(assets)
    with closing(run.tables()) as tables:
        chats = chats_of_run(tables, config, started, assets, tokenizer)
        recorded = frozenset(
            digest for (digest,) in tables.query("select reward_digest from workers")
        )
    with ExitStack() as stack:
        pools = [(spec, stack.enter_context(TaskPool(spec.task))) for spec in pool_specs(config)]
        facts = [pool.wait() for _, pool in pools]
        for (spec, _), its in zip(pools, facts, strict=True):
            if not other_rewards:
                check_scoring(its, started, spec.sources)
            check_data(its, started, spec.sources)
        together = {
            source
            for (spec, _), its in zip(pools, facts, strict=True)
            if its.scores_groups
            for source in spec.sources
        }
        yield OpenTask(
            ports=task_ports(pools, tokenizer, chats),
            reward_digest=reward_digest_of(facts),
            recorded=recorded,
            stopped=_stopped(config, tokenizer, chats),
            together=frozenset(together),
        )


def chats_of_run(
    tables: Catalogue, config: Config, started: RunStarted, assets: Path, tokenizer: Tokenizer
) -> dict[str, Chat]:
    """Return the workers' chats by source; empty for text prompts."""
    digests = {digest for (digest,) in tables.query("select template_digest from workers")} - {""}
    chats = recorded_chats(config, started.at_ns, assets, tokenizer, digests)
    if chats:
        say_other_code("chat's rendering", digests, digest_of(chats))
    return chats


def codes_of(joins: Iterable[WorkerJoined], source: str) -> set[str]:
    """Return the workers' reward code digests."""
    return {join.reward_digests.get(source, join.reward_digest) for join in joins}


def say_other_code(what: str, digests: set[str] | frozenset[str], here: str) -> None:
    """Print worker digests that differ from `here`."""
    for digest in sorted(digests - {here}):
        then, now = digest[:12] or "unknown", here[:12] or "unknown"
        say(f"the {what} differs: {now} here, {then} on workers of the run")


def _stopped(
    config: Config, tokenizer: Tokenizer, chats: Mapping[str, Chat]
) -> Callable[[Sequence[int]], bool]:
    texts = config.sampling.stop
    stop_ids = set(tokenizer.stop_ids).union(*(chat.stop_ids for chat in chats.values()))

    def stopped(ids: Sequence[int]) -> bool:
        if not ids:
            return False
        return ids[-1] in stop_ids or (bool(texts) and tokenizer.full_text(ids).endswith(texts))

    return stopped


def with_rewards(config: Config, rewards: Sequence[str], directory: Path | None) -> Config:
    """Set rewards: ``module:function``, a built-in one or a `task.reward` value; ``NAME=...`` for
    one task. Raises UsageError."""
    by_name = {"": ""}
    for spec in rewards:
        named = NAMED.fullmatch(spec)
        by_name["" if named is None else named[1]] = spec if named is None else named[2]
    names = {task.name for task in config.tasks} | {""}
    if unknown := sorted(by_name.keys() - names):
        hint = f"one of {', '.join(sorted(names - {''})) or 'none has a name'}"
        raise UsageError(f"no task {unknown[0]!r}", hint=hint)

    def changed(task: Task) -> Task:
        use = by_name.get(task.name) or by_name[""]
        where = task.directory if directory is None else str(directory.resolve())
        if not use:
            return task
        if task.url:
            raise UsageError(
                f"the task at {task.urls[0]} has the reward that its server has",
                hint="start the server with the other reward and remove --reward",
            )
        reward = _uses(use) if use.startswith(("{", "[")) else use
        return msgspec.structs.replace(task, reward=reward, directory=where)

    return with_each_task(config, changed)


def _uses(words: str) -> tuple[RewardUse, ...]:
    """Parse an inline table or list. Raises UsageError."""
    try:
        rewards = tomllib.loads(f"rewards = {words}")["rewards"]
        listed = rewards if isinstance(rewards, list) else [rewards]
        return msgspec.convert(listed, tuple[RewardUse, ...])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"--reward {words}: {error}", hint=INLINE_HINT) from None

"""The task of a run on this machine, to be asked again, and its records to ask it of.

What is another here than the workers had (code of a reward, rendering of a chat) is said first: it
explains what comes out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dora_pipe.catalogue.database import Catalogue
from dora_pipe.config.model import Config
from dora_pipe.config.several import pool_specs
from dora_pipe.core.console import say
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.registry import check_data, check_scoring, reward_digest_of
from dora_pipe.producers.worker.chats import digest_of, recorded_chats
from dora_pipe.producers.worker.ports import TaskPorts
from dora_pipe.producers.worker.role import task_ports
from dora_pipe.schemas.control import RunStarted, WorkerJoined


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAgain:
    """What asks the task of a run, as its workers did."""

    ports: TaskPorts
    reward_digest: str
    """Of the code of its rewards here."""
    recorded: frozenset[str]
    """The same of the workers of the run."""
    stopped: Callable[[Sequence[int]], bool]
    """Whether a turn ended by a stop token or a stop string."""
    together: frozenset[str]
    """Sources of the groups whose siblings are also scored together here."""


@contextmanager
def opened_task(
    run: OpenRun, config: Config, *, other_rewards: bool = False
) -> Iterator[TaskAgain]:
    """Start the processes of the task; `other_rewards`: it need not score groups as the run does.

    Raises TaskError, ConfigError, InvariantBroken where the data are not those of the run.
    """
    started, _ = policy_after(run.bus, run.topics, 0)
    assets = run.policies.assets(started.assets_digest)
    tokenizer = Tokenizer(assets)
    with closing(run.tables()) as tables:
        chats = chats_of_run(tables, config, started, assets, tokenizer)
        recorded = frozenset(one for (one,) in tables.query("select reward_digest from workers"))
    with ExitStack() as stack:
        pools = [(one, stack.enter_context(TaskPool(one.task))) for one in pool_specs(config)]
        facts = [pool.wait() for _, pool in pools]
        for (one, _), its in zip(pools, facts, strict=True):
            if not other_rewards:
                check_scoring(its, started, one.sources)
            check_data(its, started, one.sources)
        together = {
            source
            for (one, _), its in zip(pools, facts, strict=True)
            if its.scores_groups
            for source in one.sources
        }
        yield TaskAgain(
            ports=task_ports(pools, tokenizer, chats),
            reward_digest=reward_digest_of(facts),
            recorded=recorded,
            stopped=_stopped(config, tokenizer, chats),
            together=frozenset(together),
        )


def chats_of_run(
    tables: Catalogue, config: Config, started: RunStarted, assets: Path, tokenizer: Tokenizer
) -> dict[str, Chat]:
    """The chats that workers of the run had, by source; none where its prompts are text."""
    digests = {one for (one,) in tables.query("select template_digest from workers")} - {""}
    chats = recorded_chats(config, started.at_ns, assets, tokenizer, digests)
    if chats:
        say_other_code("chat's rendering", digests, digest_of(chats))
    return chats


def codes_of(joins: Iterable[WorkerJoined], source: str, *, several: bool) -> set[str]:
    """Digests of the code of a source's rewards that workers had; with `several` tasks nothing of
    workers that named that of all in one."""
    some = (one for one in joins if one.reward_digests or not several)
    return {one.reward_digests.get(source, one.reward_digest) for one in some}


def say_other_code(what: str, digests: set[str] | frozenset[str], here: str) -> None:
    """Another one than workers had explains what differs; it is said first."""
    for digest in sorted(digests - {here}):
        then, now = digest[:12] or "unknown", here[:12] or "unknown"
        say(f"the {what} is another one here ({now}) than workers of the run had ({then})")


def _stopped(
    config: Config, tokenizer: Tokenizer, chats: Mapping[str, Chat]
) -> Callable[[Sequence[int]], bool]:
    """Whether a turn ended by a stop token or a stop string."""
    samplings = (config.sampling, *(one.sampling for one in config.evaluations))
    texts = tuple(text for one in samplings for text in one.stop if text)

    stop_ids = set(tokenizer.stop_ids).union(*(one.stop_ids for one in chats.values()))

    def stopped(ids: Sequence[int]) -> bool:
        if not ids:
            return False
        return ids[-1] in stop_ids or (bool(texts) and tokenizer.full_text(ids).endswith(texts))

    return stopped

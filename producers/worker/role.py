"""Worker role: joins the run, serves, and joins again after a fence.

Data and model files with other digests are rejected. The offset of `worker joined` is the
incarnation. A fenced worker ends if another process took its name, since the two would fence each
other repeatedly.
"""

from __future__ import annotations

import logging
import os
import platform
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from dora_pipe import __version__
from dora_pipe.bus.bus import Bus, Writer
from dora_pipe.config import model
from dora_pipe.config.logged import logged_config
from dora_pipe.config.several import PoolSpec, pool_specs, with_tasks_of
from dora_pipe.core.errors import (
    ConfigError,
    Fenced,
    OutcomeUnknown,
    PolicyError,
    ResourceError,
)
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.loop.run_lifecycle import records_between, run_is_over, wait_for_run
from dora_pipe.core.loop.runtime import Meter, Runtime
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.core.pure.status_schedule import quiet_ns
from dora_pipe.core.pure.wait_tracker import Limits
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.engine import Engine, SamplingParams
from dora_pipe.producers.engines.registry import capabilities, check_capabilities
from dora_pipe.producers.engines.requests import Decode
from dora_pipe.producers.sessions.endpoint import SessionPort, reach_directly
from dora_pipe.producers.sessions.frames import Addresses, EndpointSetup, SourceSetup
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.registry import (
    check_data,
    check_scoring,
    packages_of,
    reward_digest_of,
)
from dora_pipe.producers.worker.chats import Pools, chats_of, digest_of
from dora_pipe.producers.worker.engine_port import EnginePort, Policies
from dora_pipe.producers.worker.kv_handover import Handover, NoHandover
from dora_pipe.producers.worker.machine import WorkerMachine, WorkerOutcome
from dora_pipe.producers.worker.ports import (
    HandoverPort,
    RecordPort,
    TaskPort,
    TaskPorts,
    WorkerPorts,
)
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.schemas.control import RunStarted, WorkerJoined, decode_control
from dora_pipe.schemas.identity import source_of
from dora_pipe.schemas.metrics import FailingServer
from dora_pipe.schemas.topics import NO_WORKER_NAME, RULE, Topics, check_worker_name
from dora_pipe.schemas.wire import encode
from dora_pipe.store.model_dir import asset_files
from dora_pipe.store.names import assets_digest

LOG = logging.getLogger(__name__)

POLL_S: Final = 0.25


FAILING_REPORTED_MAX: Final = 8

REJOINS_MAX: Final = 8

TASK_CALLS: Final = 3
"""Time limits of calls before a waiting request raises an alarm."""


Joined = Callable[[WorkerSetup, Mapping[str, TaskFacts]], None]
"""Called after joining, before the first decision."""


class EngineFactory(Protocol):
    """Creates an engine; `decode` is for stop strings."""

    def __call__(self, *, assets: Path, config: model.Config, decode: Decode) -> Engine:
        """Raises PolicyError if the engine cannot run the model."""


class OpenPool(Protocol):
    """Starts the processes of a task."""

    def __call__(self, task: model.Task, *, clock: Clock) -> TaskPool:
        """Return a `TaskPool`, which the worker closes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    bus: Bus
    topics: Topics
    name: str
    store: Policies
    engine_factory: EngineFactory
    open_pool: OpenPool
    handover: Handover
    transfers: str
    stop: Callable[[], bool]
    clock: Clock
    meter: Meter
    run: RunStarted
    config: model.Config
    joined: Joined
    source: str

    @property
    def pools(self) -> list[PoolSpec]:
        every = pool_specs(self.config)
        return [pool for pool in every if not self.source or self.source in pool.sources]

    @property
    def colocated(self) -> bool:
        return self.config.workers.is_colocated(self.name)


def run_worker(
    bus: Bus,
    topics: Topics,
    *,
    worker: str,
    store: Policies,
    engine_factory: EngineFactory,
    stop: Callable[[], bool],
    config: model.Config | None = None,
    open_pool: OpenPool | None = None,
    handover: Handover | None = None,
    transfers: str = "",
    clock: Clock | None = None,
    meter: Meter | None = None,
    joined: Joined = lambda setup, facts: None,
    source: str = "",
) -> None:
    """Run the worker of this name until the run ends or `stop` returns True.

    `config` supplies the free keys of this machine; all others come from the log. `transfers` is
    the address of its weights. `joined` may write decisions if no orchestrator does. `source`
    limits the process to one task. Call it in the main thread.

    Raises ConfigError, TaskError or PolicyError if files differ from the run's, ResourceError if
    this machine cannot host a version, Fenced if another process took the name.
    """
    check_worker_name(worker)
    clock = clock or SystemClock()
    run = wait_for_run(bus, topics, stop, clock)
    if run is None:
        return
    process = _Worker(
        bus=bus,
        topics=topics,
        name=worker,
        store=store,
        engine_factory=engine_factory,
        open_pool=open_pool or TaskPool,
        handover=handover or NoHandover(),
        transfers=transfers,
        stop=stop,
        clock=clock,
        meter=meter or Meter(),
        run=run,
        config=worker_config(run, config),
        joined=joined,
        source=source,
    )
    instances: set[str] = set()
    for _ in range(REJOINS_MAX + 1):
        incarnation, outcome = _incarnation(process, instances)
        if outcome not in ("fenced", "replaced"):
            return
        _check_name_is_free(process, incarnation, instances)
        LOG.warning("worker %s was fenced (incarnation %d); joining again", worker, incarnation)
    raise Fenced(
        f"worker {worker} was fenced {REJOINS_MAX + 1} times",
        hint="check the load of this machine, or raise timing.lease_s",
    )


def sampling_params(sampling: model.Sampling, stop_ids: tuple[int, ...]) -> SamplingParams:
    """Return the engine's settings for a sampling section."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop_ids=stop_ids,
        stop=sampling.stop,
        logprob_temperature=sampling.logprob_temperature,
        routes=sampling.return_routed_experts,
    )


def params_by_source(
    config: model.Config, stop_ids: tuple[int, ...], chats: Mapping[str, Chat]
) -> dict[str, SamplingParams]:
    """Return sampling settings by source; a chat supplies its stop ids."""

    def params(source: str, sampling: model.Sampling) -> SamplingParams:
        chat = chats.get(source)
        return sampling_params(sampling, stop_ids if chat is None else chat.stop_ids)

    return {
        source: params(source, section) for source, section in sampling_by_source(config).items()
    }


def sampling_by_source(config: model.Config) -> dict[str, model.Sampling]:
    train = [(source_of("train", task.name), config.sampling) for task in config.tasks]
    evaluations = [
        (source_of("eval", task.name), config.eval_sampling(task)) for task in config.evaluations
    ]
    return dict((*train, *evaluations))


def turns_by_source(config: model.Config) -> dict[str, int]:
    return {source: spec.task.most_turns for spec in pool_specs(config) for source in spec.sources}


def agents_by_source(config: model.Config) -> dict[str, model.Task]:
    """Return the tasks with an agent by source."""
    agents = [spec for spec in pool_specs(config) if spec.task.has_agent]
    return {source: spec.task for spec in agents for source in spec.sources}


def requests_move(config: model.Config, facts: Mapping[str, TaskFacts]) -> bool:
    """Return whether every request can move: a single turn, a session or a replayable episode."""
    agents = agents_by_source(config)
    moving = (
        task_facts.single_turn or task_facts.replayable or source in agents
        for source, task_facts in facts.items()
    )
    return all(moving)


def worker_config(run: RunStarted, local: model.Config | None) -> model.Config:
    """Return the run's configuration with local free keys."""
    config = logged_config(run.config)
    if local is None:
        return config
    config = with_tasks_of(config, local)
    return msgspec.structs.replace(
        config, workers=local.workers, timing=local.timing, bus=local.bus
    )


def _incarnation(process: _Worker, instances: set[str]) -> tuple[int, WorkerOutcome]:
    """Run one incarnation; incarnation -1 if it never joined."""
    with ExitStack() as stack:
        reach_directly(process.config.workers.endpoint)
        # Task processes import and read data while the engine starts.
        pools = [
            (spec, stack.enter_context(process.open_pool(spec.task, clock=process.clock)))
            for spec in process.pools
        ]
        assets = _checked_assets(process)
        tokenizer = Tokenizer(assets)
        engine = process.engine_factory(
            assets=assets, config=process.config, decode=tokenizer.full_text
        )
        stack.callback(engine.close)
        check_capabilities(engine, process.config, assets, colocated=process.colocated)
        if process.config.lora.rank:  # Versions are adapters of version 0.
            policy = process.run.policy
            engine.load(process.store.weights(policy.digest), version=0, digest=policy.digest)
            engine.drop(0)
        facts = _checked_facts(process, pools)
        if not facts:
            return -1, "left"
        chats = chats_of(pools, process.run.at_ns, assets, tokenizer, stop=process.stop)
        endpoint = _endpoint(process, stack, engine, assets, chats)
        writer = stack.enter_context(closing(process.bus.writer()))
        decisions_from = process.bus.end(TopicPartition(process.topics.decisions, 0))
        if run_is_over(process.bus, process.topics, decisions_from, process.clock):
            LOG.info("worker %s: run %s is over", process.name, process.topics.run)
            return -1, "left"
        joined = _joined(process, engine, facts, digest_of(chats))
        instances.add(joined.instance)
        incarnation = _join(process, writer, joined)
        LOG.info("worker %s joined, incarnation %d", process.name, incarnation)
        params = params_by_source(process.config, tokenizer.stop_ids, chats)
        setup = _setup(process, engine, params, facts, incarnation, decisions_from)
        addresses = None if endpoint is None else endpoint.addresses
        tasks = task_ports(pools, tokenizer, chats, addresses)
        process.joined(setup, facts)
        return incarnation, _serve(
            process, setup, writer, engine, tasks, endpoint, failing=partial(_failing, pools)
        )


def task_ports(
    pools: Pools,
    tokenizer: Tokenizer,
    chats: Mapping[str, Chat],
    addresses: Addresses | None = None,
) -> TaskPorts:
    """Return a port per source, with the task's rule for control tokens in text."""
    ports: dict[str, TaskPort] = {}
    for spec, pool in pools:
        chat = chats.get(spec.sources[0])
        called = addresses if spec.task.has_agent else None
        port = TaskPort(pool, tokenizer.reading(spec.task.special_tokens), chat, called)
        ports |= dict.fromkeys(spec.sources, port)
    return TaskPorts(ports)


def _endpoint(
    process: _Worker, stack: ExitStack, engine: Engine, assets: Path, chats: Mapping[str, Chat]
) -> SessionPort | None:
    specs = [spec for spec in process.pools if spec.task.has_agent]
    if not specs:
        return None
    sampling = sampling_by_source(process.config)
    sources = tuple(
        SourceSetup(
            sources=(source,),
            task=spec.task,
            sampling=sampling[source],
            chat=source in chats,
        )
        for spec in specs
        for source in spec.sources
    )
    setup = EndpointSetup(
        listen=process.config.workers.endpoint,
        assets=str(assets),
        started_ns=process.run.at_ns,
        model=process.topics.run,
        context_tokens=engine.context_tokens,
        sources=sources,
    )
    return stack.enter_context(closing(SessionPort(setup)))


def _failing(pools: Pools) -> tuple[FailingServer, ...]:
    failing = {(server.task, server.url): server for _, pool in pools for server in pool.failing}
    return tuple(failing.values())[:FAILING_REPORTED_MAX]


def _serve(
    process: _Worker,
    setup: WorkerSetup,
    writer: Writer,
    engine: Engine,
    tasks: TaskPorts,
    sessions: SessionPort | None,
    *,
    failing: Callable[[], tuple[FailingServer, ...]],
) -> WorkerOutcome:
    machine = WorkerMachine(
        setup,
        cost=process.meter.cost,
        kv_used=lambda: engine.kv_used_tokens,
        prompt_tokens=lambda: engine.prompt_tokens,
        failing=failing,
        codec=process.meter.spend("codec"),
    )
    runtime = Runtime(
        machine,
        bus=process.bus,
        writer=writer,
        port=WorkerPorts(
            tasks=tasks,
            sessions=sessions,
            records=RecordPort(process.bus, process.topics, process.meter, clock=process.clock),
            handover=HandoverPort(process.handover),
            engine=EnginePort(
                engine,
                process.store.weights,
                verify=process.store.verify,
                clock=process.clock,
            ),
        ),
        clock=process.clock,
        meter=process.meter,
        exclusive=False,
        background=True,
    )
    with closing(runtime):
        runtime.run(process.stop)
    if machine.run_over:
        process.handover.clear()
    if machine.error:
        kind = ResourceError if machine.error_is_local else PolicyError
        raise kind(machine.error, hint=machine.error_hint)
    if machine.fenced_for.startswith(NO_WORKER_NAME):  # a naming rule of a newer version
        raise ConfigError(machine.fenced_for, hint=RULE)
    LOG.info("worker %s: %s %s", process.name, machine.outcome, dict(machine.requests.counts))
    return machine.outcome


def _setup(
    process: _Worker,
    engine: Engine,
    params: Mapping[str, SamplingParams],
    facts: Mapping[str, TaskFacts],
    incarnation: int,
    decisions_from: int,
) -> WorkerSetup:
    # Calls that reach their own limit raise no alarm.
    calls_s = TASK_CALLS * max(_longest_call_s(task) for task in process.config.tasks)
    return worker_setup(
        process.config,
        calls_s=calls_s,
        topics=process.topics,
        worker=process.name,
        incarnation=incarnation,
        slots=engine.slots,
        prefetch=process.config.workers.prefetch,
        context_tokens=engine.context_tokens,
        decisions_from=decisions_from,
        digests={source: task.data(source).digest for source, task in facts.items()},
        params=params,
        transfers=process.transfers,
        max_resident_versions=engine.max_resident_versions,
    )


def worker_setup(config: model.Config, *, calls_s: float = 0.0, **own: Any) -> WorkerSetup:
    """Build a `WorkerSetup`; task calls of up to `calls_s` raise no alarm."""
    timing = config.timing
    return WorkerSetup(
        checkpoint_tokens=config.workers.checkpoint_tokens,
        max_turns=turns_by_source(config),
        heartbeat_ns=int(timing.heartbeat_s * 1e9),
        quiet_ns=quiet_ns(timing),
        stop_timeout_ns=int(timing.stop_timeout_s * 1e9),
        agents=frozenset(agents_by_source(config)),
        partial_rollout=config.staleness.partial_rollout,
        limits=Limits(short_s=max(timing.alarm_s, calls_s), work_s=timing.alarm_work_s),
        **own,
    )


def _longest_call_s(task: model.Task) -> float:
    return max(task.reward_timeout_s, 2 * task.environment_timeout_s)  # a step and its tools


# Before joining


def _checked_assets(process: _Worker) -> Path:
    path = process.store.assets(process.run.assets_digest)
    if not path.is_dir():
        raise PolicyError(
            f"no config and tokenizer files at {path}",
            hint="the worker needs the run's policy store; set store.path",
        )
    if assets_digest(asset_files(path)) != process.run.assets_digest:
        raise PolicyError(f"the config or tokenizer files at {path} were changed")
    return path


def _checked_facts(process: _Worker, pools: Pools) -> dict[str, TaskFacts]:
    """Return task facts by source; empty after a stop. Raises TaskError."""
    facts: dict[str, TaskFacts] = {}
    for spec, pool in pools:
        while pool.facts is None:
            if process.stop():
                return {}
            pool.poll(POLL_S)
        check_scoring(pool.facts, process.run, spec.sources)
        check_data(pool.facts, process.run, spec.sources)
        facts |= dict.fromkeys(spec.sources, pool.facts)
    return facts


# Joining


def _joined(
    process: _Worker, engine: Engine, facts: Mapping[str, TaskFacts], template_digest: str
) -> WorkerJoined:
    moves = requests_move(process.config, facts)
    return WorkerJoined(
        at_ns=process.clock.wall_ns(),
        worker=process.name,
        instance=uuid.uuid4().hex,
        host=platform.node(),
        pid=os.getpid(),
        slots=engine.slots,
        prefetch=process.config.workers.prefetch,
        kv_tokens=engine.kv_tokens,
        engine=engine.name,
        engine_version=engine.version,
        dtype=engine.dtype,
        device=engine.device,
        declares=capabilities(engine, moves=moves),
        assets_digest=process.run.assets_digest,
        reward_digest=reward_digest_of(facts.values()),
        package=__version__,
        max_resident_versions=engine.max_resident_versions,
        template_digest=template_digest,
        packages=packages_of(facts.values()),
        colocated=process.colocated,
        reward_digests={
            source: task_facts.reward_digest
            for source, task_facts in facts.items()
            if "/" in source
        },
    )


def _join(process: _Worker, writer: Writer, joined: WorkerJoined) -> int:
    """Return the offset; after an unknown outcome, search for the record first."""
    start = process.bus.end(TopicPartition(process.topics.control, 0))
    append = Append(topic=process.topics.control, key=joined.worker.encode(), value=encode(joined))

    def join() -> int:
        try:
            return writer.append([append])[0]
        except OutcomeUnknown:
            for record, other in _joins(process, start):
                if other.instance == joined.instance:
                    return record.offset
            raise

    return retry_bus("joining", join, process.clock)


def _joins(process: _Worker, start: int) -> Iterator[tuple[Record, WorkerJoined]]:
    control = TopicPartition(process.topics.control, 0)
    end = process.bus.end(control)
    for record in records_between(process.bus, control, start, end, process.clock):
        if b'"worker-joined"' in record.value:  # avoids decoding most records
            decoded = decode_control(record.value)
            if isinstance(decoded, WorkerJoined):
                yield record, decoded


def _check_name_is_free(process: _Worker, incarnation: int, instances: set[str]) -> None:
    """Raises Fenced if another process joined under this name after `incarnation`."""
    for record, joined in _joins(process, incarnation):
        if joined.worker == process.name and joined.instance not in instances:
            raise Fenced(
                f"another process ({joined.host}, pid {joined.pid}) joined as worker"
                f" {process.name}, incarnation {record.offset}",
                hint="give every worker its own name",
            )

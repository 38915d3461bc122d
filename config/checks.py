"""Conditions between sections of a configuration. Each problem is one line that names the key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from dora_pipe.config.batches import group_problems
from dora_pipe.config.model import (
    LEARNING_RATE_MAX,
    LINEAR_LAYERS,
    TEMPERATURE_MAX,
    TEMPERATURE_MIN,
    Config,
    Sampling,
    async_batches,
)
from dora_pipe.config.objectives import rewarded
from dora_pipe.schemas.topics import PATTERN, RULE
from dora_pipe.schemas.wire import RECORD_BYTES_MAX

ROUND_DECISIONS_MAX: Final = 500
"""The planner leaves the rest to the next round (`orchestrator.planner.DECISIONS_MAX`), except the
groups of one evaluation."""

PORT_MAX: Final = 65_535

WEIGHT_MAX: Final = 1e6
"""Bound of the objective's weights, as `schemas.wire.REWARD_MAX` bounds rewards."""

_ROUND_BYTES: Final = 4096
"""Bytes of a round without its decisions."""


_TAKEN_GROUP_BYTES: Final = 75
_TAKEN_BYTES: Final = 116
_SCORED_BYTES: Final = 37
_DISPATCH_BYTES: Final = 446
_PLACE_BYTES: Final = 506
_PLACED_BYTES: Final = 19
"""Bytes of a decision's parts with ids and offsets of ten digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem on one line that begins with its key, and a hint."""

    text: str
    hint: str | None = None


def problems_of(config: Config) -> Iterator[Problem]:
    """Return all problems."""
    for check in _CHECKS:
        for problem in check(config):
            yield Problem(text=problem) if isinstance(problem, str) else problem


def round_bytes(config: Config) -> int:
    """Return the approximate bytes of the largest round, as a lower bound. A round may take a
    batch, dispatch a whole evaluation and admit as many groups as the decision limit allows."""
    rollout, named = config.rollout, _names_bytes(config)
    dispatched, to_schedule = _DISPATCH_BYTES + named, _PLACE_BYTES + named
    budget = math.ceil(async_batches(config.staleness) * rollout.prompts_per_step)
    trajectories = rollout.group_size + rollout.group_redundancy
    admitted = min(budget, ROUND_DECISIONS_MAX // (trajectories + 1) + 1)
    evaluated = sum(
        evaluation.prompts * dispatched
        + min(evaluation.prompts, ROUND_DECISIONS_MAX // (evaluation.group_size + 1) + 1)
        * (to_schedule + evaluation.group_size * _PLACED_BYTES)
        for evaluation in config.evaluations
    )
    return (
        _ROUND_BYTES
        + rollout.prompts_per_step * _taken_bytes(config)
        + admitted * (dispatched + to_schedule + trajectories * _PLACED_BYTES)
        + evaluated
    )


def commit_problem(config: Config, manifest_bytes: int) -> Problem | None:
    """Return why commits would not fit into a record. A commit names its batch and, in a manifest
    of this size, the tensors of a version."""
    if config.lora.rank:
        return None
    batch = config.rollout.prompts_per_step * _taken_bytes(config)
    need, limit = _ROUND_BYTES + batch + manifest_bytes, config.bus.max_record_bytes
    if need <= limit:
        return None
    what = (
        f"bus.max_record_bytes: a commit has up to {need} bytes, {manifest_bytes} of them the names"
        f" of the model's tensors, and a record may have {limit}"
    )
    fits = need <= RECORD_BYTES_MAX
    hint = f"bus.max_record_bytes = {need} or more, or smaller batches"
    return Problem(text=what, hint=hint if fits else "fewer groups per step, or smaller ones")


def _names_bytes(config: Config) -> int:
    both = config.tasks, config.evaluations
    longest = sum(max(len(section.name) for section in all_of) for all_of in both)
    return longest + len(b',"task":"","evaluation":""') if longest else 0


def _taken_bytes(config: Config) -> int:
    """Return the bytes of one group in `take batch` and the commit, with joint rewards."""
    scored = any(use.group for task in config.tasks for use in task.rewards)
    each = _TAKEN_BYTES + (_SCORED_BYTES if scored else 0)
    return _TAKEN_GROUP_BYTES + (config.rollout.group_size + config.rollout.group_redundancy) * each


def _check_several(config: Config) -> Iterator[Problem]:
    for section, all_of in (("task", config.tasks), ("evaluation", config.evaluations)):
        names = [section.name for section in all_of]
        if len(names) > 1 and "" in names:
            yield Problem(
                text=f"{section}.name: one of {len(names)} has no name", hint="name each of them"
            )
        for name in filter(None, names):
            if not re.fullmatch(PATTERN, name):
                yield Problem(text=f"{section}.name: {name!r} is not a valid name", hint=RULE)
            elif names.count(name) > 1:
                yield Problem(text=f"{section}.name: used twice: {name}")
    there = [task.name for task in config.tasks]
    for evaluation in config.evaluations:
        if evaluation.task and evaluation.task not in there:
            yield Problem(
                text=f"evaluation.task: unknown task {evaluation.task}",
                hint=f"there are: {', '.join(filter(None, there)) or 'none with a name'}",
            )


def _check_records(config: Config) -> Iterator[Problem]:
    """Decisions and commits are never stored as blobs: the largest must fit into a record."""
    need, limit = round_bytes(config), config.bus.max_record_bytes
    rollout, prompts = config.rollout, sum(evaluation.prompts for evaluation in config.evaluations)
    what = (
        f"a round of {rollout.prompts_per_step} groups of {rollout.group_size}"
        " (rollout.prompts_per_step, rollout.group_size) and"
        f" {prompts} evaluation.prompts has up to {need} bytes"
    )
    if need > RECORD_BYTES_MAX:
        yield Problem(
            text=f"rollout.prompts_per_step: {what}, and a decision may have {RECORD_BYTES_MAX}",
            hint="fewer groups per step, or smaller ones, or fewer evaluation.prompts",
        )
    elif need > limit:
        yield Problem(
            text=f"bus.max_record_bytes: {what}, and a record may have {limit}",
            hint=f"bus.max_record_bytes = {need} or more, or smaller batches",
        )


def _check_pace(config: Config) -> Iterator[str]:
    budget = config.staleness.max_staleness + 1
    chosen = async_batches(config.staleness)
    if not 1 <= chosen <= budget:
        yield (
            f"staleness.async_batches: {chosen:g} is not between 1 and {budget} (max_staleness + 1)"
        )
    timing = config.timing
    if timing.lease_s <= 2 * timing.heartbeat_s:
        yield (
            f"timing.lease_s: {timing.lease_s:g} is not more than two heartbeats of"
            f" {timing.heartbeat_s:g} s: one late heartbeat would fence a role"
        )


def _check_lengths(config: Config) -> Iterator[str]:
    context = config.workers.max_model_len
    tasks = {"sampling": config.tasks} | {
        "evaluation.sampling": tuple(map(config.task_of, config.evaluations))
    }
    for key, sampling in _samplings(config):
        # An agent's limit spans its conversations, and each of them has one context.
        single_turn = not all(task.has_agent for task in tasks[key])
        if single_turn and sampling.max_tokens >= context:
            yield (
                f"{key}.max_tokens: {sampling.max_tokens} leaves no prompt tokens in"
                f" workers.max_model_len, {context}"
            )
        hot = sampling.temperature
        if hot and not TEMPERATURE_MIN <= hot <= TEMPERATURE_MAX:
            yield (
                f"{key}.temperature: {hot:g} is neither 0 (greedy) nor between {TEMPERATURE_MIN:g}"
                f" and {TEMPERATURE_MAX:g}"
            )
        if "" in sampling.stop:
            yield f"{key}.stop: an empty string would end every turn immediately"
    if config.trainer.micro_batch_tokens < context:
        yield (
            f"trainer.micro_batch_tokens: {config.trainer.micro_batch_tokens} is less than"
            f" workers.max_model_len, {context}: the longest trajectory would not fit"
        )


def _check_numbers(config: Config) -> Iterator[str]:
    """Beyond these bounds a step overflows or a record cannot hold the number."""
    objective, trainer = config.objective, config.trainer
    for name in ("kl_coef", "teacher_weight", "positive_weight", "negative_weight"):
        value = getattr(objective, name)
        if value is not None and value > WEIGHT_MAX:
            yield f"objective.{name}: {value:g} is more than {WEIGHT_MAX:g}: losses overflow"
    if trainer.learning_rate > LEARNING_RATE_MAX:
        yield f"trainer.learning_rate: {trainer.learning_rate:g} is more than {LEARNING_RATE_MAX:g}"


def _check_schedule(config: Config) -> Iterator[Problem]:
    trainer, steps = config.trainer, config.run.steps
    if trainer.warmup_steps > steps:
        yield Problem(
            text=f"trainer.warmup_steps: {trainer.warmup_steps} is more than the {steps} steps of"
            " the run: the rate would not reach its peak",
            hint="fewer, or more run.steps",
        )
    if trainer.schedule == "constant" and trainer.min_lr_ratio:
        yield Problem(
            text="trainer.min_lr_ratio: a constant rate does not fall",
            hint='trainer.schedule = "linear" or "cosine"',
        )


def _check_rewards(config: Config) -> Iterator[str]:
    for task in config.tasks:
        for index, use in enumerate(task.rewards):
            key = f"task.reward[{index}]"
            if use.called in [reward.called for reward in task.rewards[:index]]:
                yield f"{key}: used twice: `{use.called}`; set `name` of one"
            if use.group and ":" not in use.use:
                yield f"{key}: `{use.use}` scores single answers; set group = false"
            if not 0 < abs(use.weight) <= WEIGHT_MAX:
                yield f"{key}: the weight is {use.weight:g}: 0 or beyond {WEIGHT_MAX:g}"


def _check_urls(config: Config) -> Iterator[Problem]:
    for task in config.tasks:
        for url in task.urls:
            if not re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[^:/\[\]]+):\d{1,5}", url):
                yield Problem(text=f"task.url: `{url}` is not of the form tcp://HOST:PORT")
        if task.url and task.python:
            yield Problem(
                text="task.python: the task runs where task.url says",
                hint="set it in the configuration of `dora-pipe task-server`",
            )


def _check_agents(config: Config) -> Iterator[Problem]:
    for task in config.tasks:
        if task.is_agent and task.agent:
            yield Problem(text=f"task.agent: `{task.kind}` brings its own agent")
        agent = task.agent
        if isinstance(agent, str) and agent and not re.fullmatch(r"[^:]+:[^:]+", agent):
            yield Problem(
                text=f"task.agent: `{agent}` is not of the form module:function",
                hint='"agent:run" for the function `run` of agent.py',
            )
        if isinstance(agent, tuple) and not all(agent[:1]):
            yield Problem(text="task.agent: the command is empty")
    if any(task.has_agent for task in config.tasks) and config.staleness.partial_rollout:
        yield Problem(
            text="staleness.partial_rollout: calls of an agent need a single version",
            hint="-o staleness.partial_rollout=false",
        )
    if config.sampling.return_routed_experts and config.staleness.partial_rollout:
        yield Problem(
            text="sampling.return_routed_experts: requires a single version per trajectory",
            hint="-o staleness.partial_rollout=false, or remove the key",
        )
    where = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\[\]]+):(\d{1,5})", config.workers.endpoint)
    if where is None or int(where[2]) > PORT_MAX:
        yield Problem(text=f"workers.endpoint: `{config.workers.endpoint}` is not HOST:PORT")


def _check_watched(config: Config) -> Iterator[Problem]:
    watched = [
        evaluation for evaluation in config.evaluations if evaluation.best or evaluation.patience
    ]
    for evaluation in watched[1:]:
        key = "best" if evaluation.best else "patience"
        yield Problem(
            text=f"evaluation.{evaluation.name}.{key}: `{watched[0].name}` has best or patience",
            hint="best and patience apply to one evaluation per run",
        )
    for evaluation in watched[:1]:
        key = "best" if evaluation.best else "patience"
        named = f"evaluation.{evaluation.name}.{key}" if evaluation.name else f"evaluation.{key}"
        if not evaluation.every or not evaluation.prompts:
            yield Problem(
                text=f"{named}: without evaluation.every and prompts there is nothing to compare",
                hint="evaluation.every = 10, say",
            )


def _check_objective(config: Config) -> Iterator[str | Problem]:
    objective = config.objective
    if config.rollout.filter_zero_advantage and objective.advantage == "version-baseline":
        yield (
            "rollout.filter_zero_advantage: equal rewards have an"
            " advantage with objective.advantage = version-baseline"
        )
    if objective.reference_every is not None and not objective.kl_coef:
        yield Problem(
            text="objective.reference_every: there is no KL to a reference (objective.kl_coef)",
            hint="objective.kl_coef = 0.01, say, with a kind that has it",
        )


def _check_teacher(config: Config) -> Iterator[Problem]:
    teacher, kind = config.teacher, config.objective.kind
    if teacher.given and config.objective.teacher_weight is None:
        yield Problem(
            text="teacher: the objective does not use the teacher",
            hint='objective.kind = "distill", or objective.teacher_weight = 0.1, say',
        )
    if teacher.path and teacher.url:
        yield Problem(text="teacher.url: excludes teacher.path", hint="remove one")
    if bool(teacher.url) != bool(teacher.model):
        yield Problem(
            text="teacher.model: is required with teacher.url and allowed only there",
            hint="the model of `vllm serve`, or its --served-model-name",
        )
    if "@" in teacher.url:  # It is stored and printed: this line must not repeat it.
        yield Problem(
            text="teacher.url: no credentials in an address",
            hint="teacher.key_env names the variable with the key",
        )
    if teacher.url and (temperature := config.sampling.logprob_temperature) != 1:
        yield Problem(
            text="teacher.url: an endpoint's log-probs are of temperature 1, "
            f"the policy's {temperature:g}",
            hint="sampling.temperature = 1, or teacher.path",
        )
    if not rewarded(kind) and config.rollout.filter_zero_advantage:
        yield Problem(
            text=f"rollout.filter_zero_advantage: with objective.kind = {kind} rewards are"
            " unused, so filtering discards groups",
            hint="-o rollout.filter_zero_advantage=false",
        )


def _check_trainer(config: Config) -> Iterator[str | Problem]:
    trainer = config.trainer
    if not all(beta < 1 for beta in trainer.betas):
        yield "trainer.betas: they must be below 1"
    given = {name: getattr(trainer, name) for name in _DEEPSPEED}
    odd = sorted(name for name, plain in _DEEPSPEED.items() if given[name] != plain)
    if trainer.kind == "torch" and odd:
        yield f"trainer.{odd[0]}: {given[odd[0]]} needs trainer.kind = 'deepspeed'"
    elif trainer.offload_between_steps and trainer.batch_parts > 1:
        yield "trainer.offload_between_steps: trainer.batch_parts keeps the trainer's states in use"
    elif trainer.offload_between_steps and config.teacher.path:
        yield "trainer.offload_between_steps: the teacher of teacher.path stays on the GPU"
    elif trainer.offload == "all" and trainer.zero_stage < 3:
        yield "trainer.offload: offloading weights needs trainer.zero_stage = 3"
    elif trainer.zero_stage == 0 and trainer.offload != "none":
        yield "trainer.offload: without ZeRO (zero_stage = 0) nothing is offloaded"
    elif (trainer.kind, trainer.zero_stage, trainer.dtype) == ("deepspeed", 0, "bfloat16"):
        yield "trainer.dtype: bfloat16 needs zero_stage 1, 2 or 3, which keep float32 copies"
    if trainer.optimizer == "muon" and config.lora.rank:
        yield Problem(
            text="trainer.optimizer: muon updates hidden layers, which lora.rank freezes",
            hint="trainer.optimizer = 'adamw', or lora.rank = 0",
        )
    dealt = trainer.expert_parallel_size
    if trainer.kind != "torch" and trainer.ranks % dealt:
        text = f"{trainer.ranks} trainer.ranks is not a multiple of {dealt}"
        yield Problem(
            text=f"trainer.expert_parallel_size: {text}", hint="choose a divisor of trainer.ranks"
        )


def _check_parallel(config: Config) -> Iterator[Problem]:
    workers, vllm = config.workers, config.workers.vllm
    many = vllm.gpus
    if vllm.args and vllm.addresses:
        yield Problem(
            text="workers.vllm.args: the servers at workers.vllm.addresses have their own options",
            hint="start them with --args and remove the key",
        )
    if many == 1:
        return
    if config.sampling.return_routed_experts and vllm.pipeline_parallel_size > 1:
        yield Problem(
            text="sampling.return_routed_experts: pipeline_parallel_size splits the routing",
            hint="workers.vllm.tensor_parallel_size alone",
        )
    if len(workers.gpus) % many:
        yield Problem(text=f"workers.gpus: {len(workers.gpus)} is not a multiple of {many}")


def _check_gpus(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if not trainer.gpus:
        return
    if trainer.device == "cpu" or (trainer.kind, trainer.device) == ("torch", "auto"):
        yield "trainer.gpus: needs trainer.device = 'cuda', or the trainer may use the CPU"
    elif trainer.kind == "torch" and len(trainer.gpus) > 1:
        yield "trainer.gpus: the torch trainer has one GPU; trainer.kind = 'deepspeed' has ranks"
    elif len(set(trainer.gpus)) < len(trainer.gpus):
        yield "trainer.gpus: every rank needs its own GPU"


def _check_lora(config: Config) -> Iterator[str]:
    lora = config.lora
    odd = [target for target in lora.targets if target not in LINEAR_LAYERS]
    if odd or not lora.targets:
        value = f"`{odd[0]}`" if odd else "an empty list"
        yield f"lora.targets: {value}, expected some of {', '.join(LINEAR_LAYERS)}"
    if not lora.rank:
        return
    if config.staleness.partial_rollout:
        yield "lora.rank: adapters need no interruption for a new version"


def _check_bus(config: Config) -> Iterator[str]:
    bus = config.bus
    if "@" in bus.url and bus.url.startswith("kafka:"):
        # The address is printed and logged, so this line must not repeat it.
        yield "bus.url: no credentials in an address; see bus.username"
        return
    if bus.url and not re.match(r"sqlite:.|kafka://.", bus.url):
        yield f"bus.url: `{bus.url}` is neither sqlite:PATH nor kafka://host:port,..."
    if bus.protocol != "PLAINTEXT" and not bus.url.startswith("kafka:"):
        yield f"bus.protocol: {bus.protocol} needs a bus.url of kafka://host:port,..."
    if bus.protocol.startswith("SASL_") != bool(bus.username):
        need = "needs a" if not bus.username else "takes no"
        yield f"bus.username: protocol {bus.protocol} {need} user name"
    if bus.key_file and not bus.cert_file:
        yield "bus.key_file: a key needs its certificate, bus.cert_file"


def _check_telemetry(config: Config) -> Iterator[str]:
    traces = config.telemetry.traces
    if "@" in traces:
        # The address is stored and printed, so this line must not repeat it.
        yield "telemetry.traces: no credentials in an address; see docs/reference/traces.md"
    elif traces != "off" and not re.match(r"https?://[^/]", traces):
        yield f"telemetry.traces: `{traces}` is neither off nor http://host:4318"


def _samplings(config: Config) -> tuple[tuple[str, Sampling], ...]:
    evaluations = [
        ("evaluation.sampling", config.eval_sampling(evaluation))
        for evaluation in config.evaluations
    ]
    return ("sampling", config.sampling), *evaluations


def _colocated_problems(config: Config) -> Iterator[str]:
    workers = config.workers
    if workers.colocated > workers.count:
        yield f"workers.colocated: {workers.colocated} are more than workers.count, {workers.count}"
    conflicts = {
        "trainer.batch_parts: parts are trained during generation": config.trainer.batch_parts > 1,
        "staleness.partial_rollout: requests never move": config.staleness.partial_rollout,
        "lora.rank: workers serve several versions": config.lora.rank > 0,
    }
    for why, given in conflicts.items():
        if workers.colocated and given:
            yield f"workers.colocated: {workers.colocated} cannot be with {why}"


_DEEPSPEED: Final = {"ranks": 1, "offload": "none", "expert_parallel_size": 1}
"""Keys of [trainer] that other kinds accept only with their defaults."""

_CHECKS: Final[tuple[Callable[[Config], Iterator[str | Problem]], ...]] = (
    _check_several,
    _check_pace,
    group_problems,
    _colocated_problems,
    _check_lengths,
    _check_numbers,
    _check_schedule,
    _check_rewards,
    _check_urls,
    _check_agents,
    _check_watched,
    _check_objective,
    _check_teacher,
    _check_trainer,
    _check_parallel,
    _check_gpus,
    _check_lora,
    _check_bus,
    _check_records,
    _check_telemetry,
)

"""The configuration tree: its sections, and what a resumed run may change of them.

Each class is a section; the docstrings are what `config` and reference/configuration.md print,
where `describe` names the values that keys take. Keys are `frozen` (a resumed run must have the
same), `logged` (may change; in force from the next step, recorded in the log) or `free` (addresses,
sizes, timing); `changes` names which. `load` reads a file, `checks` says what one section asks of
another.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dora_pipe.config import objectives
from dora_pipe.config.outside import McpServer, Teacher, Telemetry, Transfers
from dora_pipe.config.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    RecordBytes,
    RunName,
    Section,
    Share,
    Siblings,
    Spare,
    Threads,
)
from dora_pipe.config.storage import Policies, Store
from dora_pipe.config.training import Trainer
from dora_pipe.config.workers import Workers
from dora_pipe.schemas.topics import PATTERN


class Run(Section, frozen=True, kw_only=True):
    """What run this is, and how long."""

    name: RunName
    """Letters, digits, `-` and `_`; the name of its directory and of its topics."""
    steps: Positive
    """The run ends when this many steps are committed."""
    seed: NonNegative = 0
    """Decides the order of prompts and every sampled token."""


class Model(Section, frozen=True, kw_only=True):
    """The policy that is trained: version 0."""

    path: str
    """A Hugging Face causal LM directory: config.json, *.safetensors, tokenizer files."""
    chat_template: str = ""
    """A file with the Jinja template for prompts that are messages, in place of the model's own; it
    is read when the run starts."""


class RewardUse(Section, frozen=True, kw_only=True):
    """One of the rewards whose weighted sum is trained."""

    use: str
    """`math`, `exact`, `none`, `regex`, `json-schema`, `code`, `judge`, or `module:function`."""
    weight: float = 1.0
    """What its score is multiplied with."""
    name: Annotated[str, Meta(pattern=f"^$|{PATTERN}")] = ""
    """Of its part in the record; empty: `use`, of a user's function its own."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """What else it takes, by name."""
    group: bool = False
    """It gives numbers for all answers to a prompt at once; only of `module:function`."""

    @property
    def called(self) -> str:
        """Its name in force."""
        return self.name or self.use.rpartition(":")[2].rpartition(".")[2]


ENVIRONMENT_TURNS, AGENT_CALLS = 8, 64
"""`task.turns_max` where it is not given."""


class Task(Section, frozen=True, kw_only=True):
    """What is learnt: data, environment and reward. Several of them, `[[task]]`, each with a name,
    are learnt in one run; `task.NAME.key` is a key of one."""

    name: str = ""
    """Letters, digits, `-` and `_`; needed where there are several tasks. Stands in dispatches,
    records and figures."""
    ratio: PositiveFloat = 1.0
    """How many of the training groups are of this task, beside the ratios of the others. After any
    number of groups each task has had its share of them, to within one group."""
    kind: str
    """`arithmetic`, `calculator`, `dataset`, an environment of others
    (`gymnasium:ID`, `reasoning-gym:NAME`, `openenv:URL`, `verifiers:NAME`;
    docs/environments.md), or `module:attribute` of your own."""
    data: str | tuple[str, ...] = ""
    """Training data: a file, a glob, a directory that `save_to_disk` wrote, `hf:NAME:CONFIG` of the
    Hugging Face hub, or several; empty where the task makes its own rows. See docs/data.md."""
    eval_data: str | tuple[str, ...] = ""
    """Evaluation data, likewise; empty where the task makes its own rows, or there is none."""
    split: str = ""
    """Of a saved data set or one of the hub, for training; empty: the only one, or `train`."""
    eval_split: str = ""
    """The same of the evaluation data; without `eval_data` it is a split of `data`."""
    eval_share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of `data` that is held out for evaluation, chosen by a hash of each row's content."""
    filter: str = ""
    """Which rows are taken: a Python expression over the columns, such as `level >= 3`."""
    columns: dict[str, str] = msgspec.field(default_factory=dict)
    """New names of columns, `{prompt = "question", answer = "solution"}`; a name of nothing leaves
    a column out. `prompt` is text or messages, `answer` is what rewards compare with."""
    chat: bool = False
    """Prompts that are text become the message of a user, for the model's chat template."""
    system_prompt: str = ""
    """The system's message in front of every conversation that has none; makes text a message."""
    tools: tuple[str, ...] = ()
    """`module:function` of Python functions that the model may call, for `dataset`."""
    mcp: tuple[McpServer, ...] = ()
    """MCP servers whose tools the model may call: `{command = ["python", "notes.py"]}`,
    `{url = "http://host/mcp"}`. See docs/tools.md."""
    reward: str | tuple[RewardUse, ...] = ""
    """`module:function`, a built-in one such as `math`, or several: `[{use = "math", weight = 1.0},
    ...]`; in place of the task's own, where a `kind` takes none. See docs/rewards.md."""
    directory: str = ""
    """Where modules of `kind` and `reward` are imported from; empty: the folder of the file."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Given to the task as keyword arguments."""
    sampler: str = ""
    """`module:weights`, a function that says how often each row comes; empty: in turn, shuffled.
    See docs/tasks.md."""
    drop_solved: float | None = None
    """Rows whose last four groups each had at least this mean reward are skipped."""
    python: str = ""
    """Path of the interpreter of another virtual environment, in which the task then runs: Python
    3.11 or newer with msgspec. Empty: that of the worker."""
    url: str | tuple[str, ...] = ""
    """`tcp://HOST:PORT` of a server of tasks (`dora-pipe task serve`), or several: the processes
    are there, as many to each, and `DORA_PIPE_TASK_TOKEN` has their token. Empty: here."""
    processes: Positive = 1
    """Processes per worker that run rewards and environments."""
    threads: Threads = 256
    """Episodes of one such process whose environments work at the same time where their code is not
    `async`, each in a thread; 1: one after the other, in its main thread."""
    reward_timeout_s: PositiveFloat = 10.0
    """A reward that takes longer is killed; its trajectory is invalid."""
    environment_timeout_s: PositiveFloat = 10.0
    """The same for a prompt, for one step of an environment, and for a tool: the model reads that
    a tool timed out."""
    episode_seconds: NonNegativeFloat = 0.0
    """An episode that is longer, from its first prompt on and with all that is sampled, is ended by
    its next step, an agent at once; its trajectory is invalid (`EpisodeTimeout`). 0: as long as it
    likes, an agent for an hour."""
    replayable: bool = False
    """Environments and tools that are told the same turns of the model again answer with the very
    same words, so that an episode goes on where it was when its worker or its process dies, and may
    move (docs/tasks.md). Tasks may say so themselves."""
    turns_max: NonNegative = 0
    """Turns of the model in one trajectory of an environment, calls of an agent; 0: 8, of an agent
    64."""
    agent: str | tuple[str, ...] = ""
    """`module:run`, a function of yours that is the rollout, or a command line such as
    `["node", "agent.js"]`: it gets an address of the model, calls it as it likes, and every sampled
    token is trained. `kind` gives rows and rewards. See docs/agents.md."""
    sampling_asked: Literal["record", "refuse"] = "record"
    """Sampling settings of an agent's call that differ from the run's: record them with the call
    and do not follow them, or refuse the call."""
    special_tokens: Literal["text", "parse"] = "text"
    """How control tokens that are written in prompts and observations are encoded: as the text that
    they are, or as the tokenizer's own tokens, which lets any text of the data or of a tool end a
    turn or begin another's. See docs/tasks.md."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Handed to the chat template by name, such as `enable_thinking`."""
    renderer: str = "auto"
    """What renders messages: `template`, the model's own; a family of the package `renderers`, such
    as `qwen3`; `auto`: the template unless it rewrites its history, then the family that fits."""
    tool_parser: str = "auto"
    """How calls are read in a turn: `hermes`, `xml`, `llama`, `glm`, `pythonic`, `module:function`
    (text to `Turn`), or `auto`: as the template writes them."""
    rewritten_history: Literal["refuse", "keep"] = "refuse"
    """Where a chat template writes earlier turns otherwise once others follow (drops thoughts):
    refuse a run of several turns, or keep what was sampled."""

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) * bool(self.url) if isinstance(self.url, str) else self.url

    @property
    def rewards(self) -> tuple[RewardUse, ...]:
        """The weighted rewards; none where `reward` names one."""
        return () if isinstance(self.reward, str) else self.reward

    @property
    def most_turns(self) -> int:
        """`turns_max` in force."""
        return self.turns_max or (AGENT_CALLS if self.has_agent else ENVIRONMENT_TURNS)

    @property
    def has_agent(self) -> bool:
        """Whether its trajectories are sessions of an agent."""
        return bool(self.agent or self.is_agent)

    @property
    def is_agent(self) -> bool:
        """Whether it brings its agent itself."""
        return self.kind.startswith("verifiers:")


TEMPERATURE_MIN, TEMPERATURE_MAX = 0.01, 100.0
"""Nearer to 0 float32 has no digits left between the likeliest tokens, and vLLM takes this minimum
in place of a smaller one; beyond 100 every token is as likely as any other."""


class Sampling(Section, frozen=True, kw_only=True):
    """How tokens are drawn."""

    temperature: NonNegativeFloat = 1.0
    """0 is greedy; else from 0.01 to 100."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keeps the most likely tokens that together reach this share; 1 keeps every token."""
    top_k: NonNegative = 0
    """0 keeps every token."""
    min_p: Share = 0.0
    """Drops tokens less likely than this share of the likeliest; 0 keeps every token."""
    max_tokens: Positive = 256
    """Sampled tokens per trajectory, over all its turns."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn, beside the tokenizer's end-of-sequence token."""
    routes: bool = False
    """Records through which experts of a mixture every token of training went, and the trainer
    routes by it (docs/large-models.md); nothing is recorded of evaluations."""

    @property
    def logprob_temperature(self) -> float:
        """Divisor of the logits before log-probs are taken; 1 where sampling is greedy."""
        return self.temperature or 1.0


class EvaluationSampling(Section, frozen=True, kw_only=True):
    """How tokens of evaluations are drawn."""

    temperature: NonNegativeFloat = 1.0
    """See [sampling]."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """See [sampling]."""
    top_k: NonNegative = 0
    """See [sampling]."""
    max_tokens: Positive = 256
    """See [sampling]."""


class Groups(Section, frozen=True, kw_only=True):
    """Groups of siblings, and batches of groups."""

    size: Siblings = 8
    """Siblings per group."""
    spare: Spare = 0
    """Siblings dispatched beside those: a group is complete when `size` are valid, the others end
    as surplus. What is slow is left out then: `audit` says by how much (docs/tasks.md)."""
    per_step: Positive = 32
    """Groups per training step (B)."""
    min_valid_siblings: Positive = 2
    """A group with fewer valid trajectories fails."""
    filter_zero_advantage: bool = False
    """End groups whose valid rewards are all equal as `filtered`, and replace them."""
    attempts_max: Positive = 5
    """Placements of one request before it counts as failed."""
    seconds_max: PositiveFloat | None = None
    """A group that generates for longer ends with what is valid by then, or fails if that is less
    than `min_valid_siblings`. Default: groups are waited for."""
    failed_share_max: Share | None = 0.9
    """The run stops when more than this share of the last 4 * per_step groups (at least 32) have
    failed, or all of the first 2 * per_step (8); 1 never stops it."""


class Staleness(Section, frozen=True, kw_only=True):
    """The bound (C3), and how much of it is used."""

    max_staleness: NonNegative = 2
    """eta: a group of version w is trained at a step <= w + eta."""
    in_flight_batches: PositiveFloat | Literal["auto"] | None = None
    """C: groups dispatched and not yet trained, in batches. Default min(2, eta + 1); "auto" begins
    there and follows what stands ready when the trainer becomes free, up to eta + 1."""
    interruptible: bool = False
    """Running requests go on under every new version after a prefill, so that a trajectory may mix
    versions (C1 is off); the bound is kept by the version at dispatch. See docs/scheduling.md."""


class Evaluation(Section, frozen=True, kw_only=True):
    """Evaluation on fixed prompts with fixed seeds. Several of them, `[[evaluation]]`, each with a
    name, may differ in everything; `evaluation.NAME.key` is a key of one."""

    name: str = ""
    """Letters, digits, `-` and `_`; needed where there are several evaluations."""
    task: str = ""
    """Name of the task whose prompts and rewards these are; empty: the first."""
    data: str | tuple[str, ...] = ""
    """In place of `task.eval_data`; empty: that of the task."""
    split: str = ""
    """In place of `task.eval_split`; empty: that of the task, or with `data` the only one."""
    every: NonNegative = 0
    """Steps between evaluations; 0 evaluates only the first and the last policy."""
    prompts: NonNegative = 64
    """Rows of the evaluation data, from the first; 0 switches evaluation off."""
    siblings: Siblings = 1
    """Trajectories per row."""
    best: bool = False
    """The version with the best mean reward here stays in the store; `export policy best`."""
    patience: NonNegative = 0
    """The run ends, as by a user's `stop`, after so many evaluations in a row without a better
    one; 0: it does not."""
    sampling: EvaluationSampling = EvaluationSampling()
    """Keys that are not given, and all others, are as in [sampling]."""


class Bus(Section, frozen=True, kw_only=True):
    """Where the log is."""

    url: str = ""
    """`sqlite:PATH` or `kafka://host:port,...`; empty is log.sqlite in the run directory."""
    partitions: Positive = 4
    """Of the trajectories and progress topics."""
    record_bytes_max: RecordBytes = 10 * 1024 * 1024
    """Largest record a topic takes when it is made; larger trajectories and progress records lie
    in the store's `claims`, and the log says which. See docs/kafka.md."""
    claims_synced: bool = False
    """A claimed value is on the disk before its record is appended. With SQLite it always is; with
    Kafka it is otherwise as safe as a broker keeps records: no kill of a process loses it, a power
    loss may."""
    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How Kafka is spoken to: with TLS or without, with a password or without."""
    mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"
    """How the password is proved, with SASL."""
    username: str = ""
    """Who this is, with SASL. The password is in the environment (DORA_PIPE_KAFKA_PASSWORD) or in
    `password_file`, never here."""
    password_file: str = ""
    """A file that holds the password; its last line end does not count."""
    ca_file: str = ""
    """PEM certificates that brokers are checked against, with TLS; empty: the machine's own."""
    cert_file: str = ""
    """PEM certificate of this client, where the brokers ask for one."""
    key_file: str = ""
    """PEM key of `cert_file`; DORA_PIPE_KAFKA_KEY_PASSWORD opens an encrypted one."""


ALARM_S = 30.0
"""Seconds after which a role that waits for an acknowledgement, a reward or a first token raises an
alarm."""
ALARM_WORK_S = 600.0
"""The same for waits that last as long as others work, until the run has shown how long they last;
then four times the longest lately."""


class Timing(Section, frozen=True, kw_only=True):
    """Heartbeats, leases and restarts."""

    heartbeat_s: PositiveFloat = 0.5
    """From news of a role to the status record that says them; without news it says so every fifth
    heartbeat, and four times in a lease at least."""
    lease_s: PositiveFloat = 10.0
    """How long a silent role counts as alive; more than two heartbeats."""
    restarts_max: NonNegative = 5
    """Restarts of one role within a minute before `run` gives up: a worker, the last one excepted,
    is then done without. So many starts in a row that hosted nothing count, too."""
    stop_timeout_s: PositiveFloat = 30.0
    """How long roles may take to stop in order before they are killed."""

    @property
    def alarm_s(self) -> float:
        """See `ALARM_S`."""
        return ALARM_S

    @property
    def alarm_work_s(self) -> float:
        """See `ALARM_WORK_S`."""
        return ALARM_WORK_S

    @property
    def plan_period_s(self) -> float:
        """The orchestrator plans anew at least this often."""
        return 3.0 * self.lease_s


LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Those that an adapter may stand beside: of attention and of the gated block."""


LEARNING_RATE_MAX = 1e3
"""Gradients are clipped, so below this an update cannot overflow float32."""


class Objective(Section, frozen=True, kw_only=True):
    """The loss. Every kind uses keys of its own, and knows a default for each; a key that it does
    not use is an error (docs/objectives.md)."""

    kind: str = "grpo"
    """Which objective: grpo, dapo, dr-grpo, decoupled-ppo, tis, cispo, topr, weighted-topr, gspo,
    distill (a teacher in place of rewards), or `module:attribute` of your own (docs/extending.md).
    Another kind than before starts from its own defaults. Those of `grpo` are DAPO's (token-mean,
    clip_high 0.28); GRPO as published is loss = "sequence-mean", clip_high = 0.2, kl = 0.04."""
    clip_low: PositiveFloat | None = None
    """The ratio is clipped below 1 - clip_low. 0.2; cispo: 1, gspo: 0.0003."""
    clip_high: PositiveFloat | None = None
    """The ratio is clipped above 1 + clip_high. 0.28; dr-grpo: 0.2, cispo: 4, gspo: 0.0004."""
    proximal: objectives.Proximal | None = None
    """The policy that ratios are clipped around: the one that sampled, or that of the step's first
    weights, whose log-probs the trainer computes. "behaviour"; decoupled-ppo, tis: "recomputed"."""
    weight_max: PositiveFloat | None = None
    """Bound of the weight proximal / behaviour. decoupled-ppo leaves tokens above it out (5), tis
    truncates them to it (2)."""
    level: objectives.Level | None = None
    """Weights per token, or one per trajectory from the product of its ratios. "token"; topr and
    weighted-topr: "sequence"."""
    positive_weight: NonNegativeFloat | None = None
    """Of trajectories with a positive advantage, in weighted-topr. 1."""
    negative_weight: NonNegativeFloat | None = None
    """Of trajectories with a negative advantage, in weighted-topr. 1."""
    loss: objectives.Averaging | None = None
    """Mean over all tokens of a minibatch, or over trajectories of their means, or their sum over
    trajectories times loss_tokens. "token-mean"; dr-grpo: "constant", gspo: "sequence-mean"."""
    loss_tokens: Positive | None = None
    """With loss = "constant": tokens that a trajectory counts as. sampling.max_tokens."""
    advantage: objectives.Advantage | None = None
    """A reward is compared with its group's mean, with the mean of its siblings (RLOO), or with
    the mean of all that its version sampled in the batch. "group"."""
    advantage_std: bool | None = None
    """Divide advantages by the standard deviation of what they are compared with. true; dr-grpo:
    false."""
    kl: NonNegativeFloat | None = None
    """Weight of the KL to the reference policy (version 0, or see `reference_every`). 0; not in
    dapo."""
    kl_estimate: objectives.KlEstimate | None = None
    """How that KL is estimated. "k3"."""
    reference_every: Positive | None = None
    """The reference moves: at step s it is the newest version that is a multiple of this. Without
    it, version 0 for ever."""
    teacher_weight: NonNegativeFloat | None = None
    """What is added to the advantage of a token: so many times log-prob under the teacher less
    log-prob under the policy. Nothing; distill: 1. It needs [teacher]."""
    mask: objectives.Mask | None = None
    """Leave out tokens whose ratio of trainer to engine is out of bounds, or trajectories by the
    product of theirs or by its geometric mean. "none"."""
    mask_low: PositiveFloat | None = None
    """Lower bound of `mask`. 0.5."""
    mask_high: PositiveFloat | None = None
    """Upper bound of `mask`. 5."""
    options: dict[str, float | int | str | bool] = msgspec.field(default_factory=dict)
    """What an objective of your own declares."""

    def __post_init__(self) -> None:
        objectives.check_kind(self.kind)
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        for key in objectives.unused(given):
            raise ValueError(objectives.why_unused(given, key))
        for key, value in objectives.defaults_of(given).items():
            if given[key] is None:
                msgspec.structs.force_setattr(self, key, value)
        low, high = self.mask_low, self.mask_high
        if low is not None and high is not None and low >= high:
            raise ValueError(f"mask_low: {low:g} is not below mask_high, {high:g}")


NO_TEACHER = "objective.teacher_weight: there is no teacher (teacher.path or teacher.url)"


class Lora(Section, frozen=True, kw_only=True):
    """A policy of version 0's weights and an adapter, which alone is trained (docs/training.md)."""

    rank: NonNegative = 0
    """Of the adapter's matrices; 0: all weights are trained, there is no adapter."""
    alpha: PositiveFloat = 16.0
    """What an adapter makes counts alpha / rank times."""
    targets: tuple[str, ...] = LINEAR_LAYERS
    """The linear layers that are adapted, in every decoder layer."""


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration of a run."""

    run: Run
    model: Model
    task: Task
    sampling: Sampling = Sampling()
    groups: Groups = Groups()
    staleness: Staleness = Staleness()
    evaluation: Evaluation = Evaluation()
    objective: Objective = Objective()
    teacher: Teacher = Teacher()
    lora: Lora = Lora()
    trainer: Trainer = Trainer()
    workers: Workers = Workers()
    bus: Bus = Bus()
    timing: Timing = Timing()
    policies: Policies = Policies()
    store: Store = Store()
    transfers: Transfers = Transfers()
    telemetry: Telemetry = Telemetry()
    more_tasks: tuple[Task, ...] | msgspec.UnsetType = msgspec.UNSET
    """The second and later `[[task]]`."""
    more_evaluations: tuple[Evaluation, ...] | msgspec.UnsetType = msgspec.UNSET
    """The second and later `[[evaluation]]`."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All of them, in the order of the file."""
        return (self.task, *(self.more_tasks or ()))

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """All of them, in the order of the file."""
        return (self.evaluation, *(self.more_evaluations or ()))

    def task_of(self, evaluation: Evaluation) -> Task:
        """Whose prompts and rewards an evaluation has; the first where it names none."""
        return next((one for one in self.tasks if one.name == evaluation.task), self.task)

    def eval_sampling(self, evaluation: Evaluation | None = None) -> Sampling:
        """How an evaluation, by default the first, is sampled; no routes are recorded of it."""
        own = msgspec.structs.asdict((evaluation or self.evaluation).sampling)
        return msgspec.structs.replace(self.sampling, routes=False, **own)

    def __post_init__(self) -> None:
        objective = self.objective
        if objective.loss == "constant" and objective.loss_tokens is None:
            filled = msgspec.structs.replace(objective, loss_tokens=self.sampling.max_tokens)
            msgspec.structs.force_setattr(self, "objective", filled)
        if objective.teacher_weight and not self.teacher.given:
            raise ValueError(NO_TEACHER)


def in_flight_batches(staleness: Staleness) -> float:
    """C in force, or the most that it can be: as configured, eta + 1 where it is automatic, else
    min(2, eta + 1)."""
    if staleness.in_flight_batches == "auto":
        return staleness.max_staleness + 1.0
    if staleness.in_flight_batches is not None:
        return staleness.in_flight_batches
    return min(2.0, staleness.max_staleness + 1.0)


def versions_resident(config: Config) -> int:
    """Versions that one engine hosts at once, in force: several only where they are adapters."""
    return config.workers.versions_resident if config.lora.rank else 1

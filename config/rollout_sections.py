"""What is generated and how it is judged: the run, its policy, task, sampling, groups and bound.

Each class is a section; the docstrings are what `config show` prints (see `model`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dora_pipe.config.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    RunName,
    Section,
    Share,
    Siblings,
)


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
    dtype: Literal["float32"] = "float32"
    """Of weights and computation."""


class Task(Section, frozen=True, kw_only=True):
    """What is learnt: data, environment and reward."""

    kind: str
    """`arithmetic`, `calculator`, `jsonl`, or `module:attribute` of a user's Task."""
    data: str = ""
    """Training data file; empty where the task makes its own rows."""
    eval_data: str = ""
    """Evaluation data file; empty where the task makes its own rows, or there is none."""
    reward: str = ""
    """`module:function`, for `jsonl`."""
    directory: str = ""
    """Where modules of `kind` and `reward` are imported from; empty: the folder of the file."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Given to the task as keyword arguments."""
    processes: Positive = 1
    """Processes per worker that run rewards and environments."""
    reward_timeout_s: PositiveFloat = 10.0
    """A reward that takes longer is killed; its trajectory is invalid."""
    environment_timeout_s: PositiveFloat = 10.0
    """The same for a prompt and for one step of an environment."""
    turns_max: Positive = 8
    """Turns of the model in one trajectory, where there is an environment."""
    special_tokens: Literal["text", "parse"] = "text"
    """How control tokens that are written in prompts and observations are encoded: as the text that
    they are, or as the tokenizer's own tokens, which lets any text of the data or of a tool end a
    turn or begin another's. See docs/tasks.md."""


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
    logprobs: Literal["tempered", "raw"] = "tempered"
    """Of which distribution log-probs are recorded, and ratios and KL taken by the trainer:
    softmax(logits / temperature), the policy that samples, or softmax(logits), as older logs have
    it. Truncation (top_p, top_k, min_p) is in neither; of a greedy policy both are softmax(logits).
    See docs/objectives.md."""

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by before log-probs are taken of them."""
        return self.temperature if self.logprobs == "tempered" and self.temperature else 1.0


class Groups(Section, frozen=True, kw_only=True):
    """Groups of siblings, and batches of groups."""

    size: Siblings = 8
    """Siblings per group."""
    per_step: Positive = 32
    """Groups per training step (B)."""
    min_valid_siblings: Positive = 2
    """A group with fewer valid trajectories fails."""
    filter_zero_advantage: bool = False
    """End groups whose valid rewards are all equal as `filtered`, and replace them."""
    attempts_max: Positive = 5
    """Placements of one request before it counts as failed."""
    failed_share_max: Share | None = 0.9
    """The run stops when more than this share of the last 4 * per_step groups (at least 32) have
    failed, or all of the first 2 * per_step (8); 1 never stops it."""


class Staleness(Section, frozen=True, kw_only=True):
    """The bound (C3), and how much of it is used."""

    max_staleness: NonNegative = 2
    """eta: a group of version w is trained at a step <= w + eta."""
    in_flight_batches: PositiveFloat | None = None
    """C: groups dispatched and not yet trained, in batches. Default min(2, eta + 1)."""
    interruptible: bool = False
    """Running requests go on under every new version after a prefill, so that a trajectory may mix
    versions (C1 is off); the bound is kept by the version at dispatch. See docs/scheduling.md."""


class Planner(Section, frozen=True, kw_only=True):
    """Which worker hosts which version, and who moves (docs/scheduling.md)."""

    moves: bool = True
    """Running requests may move to another worker of their version; if not, workers run empty."""
    moves_max: NonNegative = 3
    """A request moves so often at most, but for a worker that is drained."""
    pack: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of a worker's slots that requests of older versions are packed into."""
    kv_pressure: Annotated[float, Meta(gt=0, le=1)] = 0.95
    """A worker whose KV cache is fuller than this share gets nothing new and lets requests go."""


class Evaluation(Section, frozen=True, kw_only=True):
    """Evaluation on fixed prompts with fixed seeds."""

    every: NonNegative = 0
    """Steps between evaluations; 0 evaluates only the first and the last policy."""
    prompts: NonNegative = 64
    """Rows of the evaluation data, from the first; 0 switches evaluation off."""
    siblings: Siblings = 1
    """Trajectories per row."""
    sampling: Sampling = Sampling()
    """Keys that are not given are as in [sampling]."""

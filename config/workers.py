"""The sections of rollout workers, their engines, and who has what of them; decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dora_pipe.config.section import NonNegative, NonNegativeFloat, Positive, Section

if TYPE_CHECKING:
    from dora_pipe.config.model import Config


class Vllm(Section, frozen=True, kw_only=True):
    """Settings of the vLLM engine; see docs/vllm.md."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation in the engine; the trainer's log-probs are those of float32."""
    eager: bool = True
    """Without compiled graphs: they cost a start of minutes, and pay on a GPU."""
    kv_gb: NonNegativeFloat = 0.0
    """GiB for the KV cache of one worker; 0 is what all slots need for whole contexts."""
    tensor_parallel: Positive = 1
    """GPUs of one worker, each of which has a part of every layer. It must divide the model's
    attention heads."""
    pipeline_parallel: Positive = 1
    """So many times as many GPUs, each group of which has some of the layers. For models that the
    GPUs of one machine side by side do not hold; KV caches do not move."""
    addresses: tuple[str, ...] = ()
    """http://HOST:PORT of servers that run already, for w0, w1, ...; a worker without
    one starts its own. The key is in the environment (VLLM_API_KEY), never here."""

    args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Other options of vLLM by name, such as `max_num_batched_tokens = 8192`; they are part of the
    engine version that a worker reports. docs/vllm.md lists those that are refused."""

    @property
    def gpus(self) -> int:
        """Of one worker."""
        return self.tensor_parallel * self.pipeline_parallel


class Workers(Section, frozen=True, kw_only=True):
    """Rollout workers."""

    count: NonNegative = 2
    """Started by `run`; others may join."""
    engine: str = "torch"
    """Which engine generates: torch, vllm, or `module:attribute` of your own
    (docs/extending.md)."""
    gpus: tuple[NonNegative, ...] = ()
    """GPUs of w0, w1, ... in turn, `vllm.tensor_parallel` each, counted from 0 among those that
    are visible; empty: all take the first. For the vLLM engine."""
    vllm: Vllm = Vllm()
    slots: Positive = 64
    """Requests that one worker generates at the same time."""
    context_tokens: Positive = 1024
    """Longest sequence a slot holds."""
    kv_keep: NonNegativeFloat = 1.0
    """Keys and values of prompts and of sequences between two calls are kept for so many times the
    tokens of all slots, beside these, in the torch engine; 0 keeps none. What was not used for
    longest goes first. vLLM keeps its own."""
    checkpoint_tokens: Positive = 128
    """A progress record every so many sampled tokens."""
    threads: Positive = 1
    """Of each worker's process."""
    endpoint: str = "127.0.0.1:0"
    """HOST:PORT at which a worker serves the model to agents; port 0: any that is free. There is no
    TLS: see docs/agents.md before this is another host."""
    elastic: NonNegative = 0
    """The last so many of the `count` workers share their GPUs with the trainer in time: they sleep
    while a step is computed (docs/scheduling.md)."""
    versions_resident: Positive = 4
    """Versions that one worker hosts at the same time, where they are adapters (`lora.rank`)."""

    @property
    def prefetch(self) -> int:
        """Placed requests that a worker holds beside those in its slots, to fill them from; one
        that waits for an environment, a tool or a reward is not among them."""
        return self.slots // 2

    def is_elastic(self, name: str) -> bool:
        """Whether the worker of this name is one of the last `elastic`."""
        last = range(max(0, self.count - self.elastic), self.count)
        return name in [f"w{number}" for number in last]


def elastic_problems(config: Config) -> Iterator[str]:
    """What workers that sleep while a step is computed cannot be with."""
    workers = config.workers
    if workers.elastic > workers.count:
        yield f"workers.elastic: {workers.elastic} are more than workers.count, {workers.count}"
    others = {
        "trainer.parts: parts are computed while the rest is generated": config.trainer.parts > 1,
        "staleness.interruptible: nothing moves": config.staleness.interruptible,
        "lora.rank: workers have several versions": config.lora.rank > 0,
    }
    for why, given in others.items():
        if workers.elastic and given:
            yield f"workers.elastic: {workers.elastic} cannot be with {why}"

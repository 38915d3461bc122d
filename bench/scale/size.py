"""Decides how large the run of `dora-pipe sim scale` is, and what is taken from papers for it.

Every number that nobody here has measured stands in this file with its source; docs/scale.md tells
them. What the project measured or decided elsewhere is imported from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Final
from zlib import crc32

from dora_pipe.bench.paper.lengths import STEP_100, Lengths
from dora_pipe.bench.paper.scaling_model import FITTED, SIBLINGS
from dora_pipe.config.model import Timing
from dora_pipe.config.workers import Workers
from dora_pipe.launch.memory_estimate import PATCH_BYTES, PATCHED_SHARE, USABLE, WIDTHS
from dora_pipe.schemas.policy import Tensor
from dora_pipe.schemas.routes import number_type
from dora_pipe.sim.modelled_worker import EngineRates, Turns, WorkerSize
from dora_pipe.store.safetensors_file import HASHERS_MAX

DAY_S: Final = 86_400.0
NOW_NS: Final = 1_790_000_000_000_000_000
"""Times in records have nineteen digits."""

FAILURES_GPU_DAY: Final = 419 / 54 / 16_384
"""Llama 3: 419 unexpected interruptions in 54 days on 16 384 GPUs (arXiv 2407.21783, 3.3.4)."""
FLOPS: Final = 989e12
"""Dense bfloat16 of an H100 or H800 (NVIDIA's data sheet)."""
UTILISATION: Final = 0.4
"""Of them in training: Llama 3 had 38 to 43 % (arXiv 2407.21783, table 4)."""
BROKER_BYTES_S: Final = 193e6
"""What one broker takes, copies with it: three with replication 3 took 193 MB/s from producers, of
which each had all (J. Kreps, Benchmarking Apache Kafka, LinkedIn 2014)."""
PARTITION_BYTES_S: Final = 40.2e6
"""What one producer got into replicated partitions when it waited for all copies (the same)."""
CATALOGUE_BYTES: Final = 93
CATALOGUE_S: Final = 46e-6
"""Of a trajectory in the catalogue's file, and of following it (bench/results/benchmarks.md,
`dora-pipe bench catalogue`)."""
REPLICATION: Final = 3
"""docs/kafka.md: any one machine may be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """A mixture of experts as files have it; the numbers are those of LongCat-Flash's config.json.

    Every layer has two attentions (latent), two dense blocks and one mixture (arXiv 2509.01322).
    """

    layers: int = 28
    hidden: int = 6144
    dense: int = 12_288
    expert: int = 2048
    experts: int = 512
    idle_experts: int = 256
    """Which compute nothing; the router chooses among all."""
    per_token: int = 12
    heads: int = 64
    head: int = 128
    rotary: int = 64
    query_rank: int = 1536
    latent: int = 512
    vocabulary: int = 131_072
    active: float = 27e9
    """Parameters that a token passes, on average."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield from self._mixture(f"{at}.mlp")
            for half in range(2):
                yield from self._attention(f"{at}.self_attn.{half}")
                yield from _gated(f"{at}.mlps.{half}", self.hidden, self.dense)
                yield f"{at}.input_layernorm.{half}.weight", (self.hidden,)
                yield f"{at}.post_attention_layernorm.{half}.weight", (self.hidden,)

    def _mixture(self, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        chosen = self.experts + self.idle_experts
        yield f"{at}.router.classifier.weight", (chosen, self.hidden)
        yield f"{at}.router.e_score_correction_bias", (chosen,)
        for one in range(self.experts):
            yield from _gated(f"{at}.experts.{one}", self.hidden, self.expert)

    def _attention(self, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        each = self.head + self.rotary
        yield f"{at}.q_a_proj.weight", (self.query_rank, self.hidden)
        yield f"{at}.q_a_layernorm.weight", (self.query_rank,)
        yield f"{at}.q_b_proj.weight", (self.heads * each, self.query_rank)
        yield f"{at}.kv_a_proj_with_mqa.weight", (self.latent + self.rotary, self.hidden)
        yield f"{at}.kv_a_layernorm.weight", (self.latent,)
        yield f"{at}.kv_b_proj.weight", (self.heads * 2 * self.head, self.latent)
        yield f"{at}.o_proj.weight", (self.hidden, self.heads * self.head)

    @property
    def parameters(self) -> int:
        """Of all tensors."""
        return _parameters(self)

    @property
    def kv_bytes(self) -> int:
        """Of a token in a KV cache, bfloat16: the latent and the rotary part, twice a layer."""
        return 2 * self.layers * (self.latent + self.rotary) * WIDTHS["bfloat16"]

    @property
    def route_bytes(self) -> int:
        """Of a token's entry in `routed_experts`."""
        experts = self.experts + self.idle_experts
        return self.layers * self.per_token * number_type(experts).itemsize


def _gated(at: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (width, hidden)
    yield f"{at}.up_proj.weight", (width, hidden)
    yield f"{at}.down_proj.weight", (hidden, width)


@cache
def _parameters(shape: MixtureShape) -> int:
    return sum(math.prod(size) for _, size in shape.tensors())


LONGCAT: Final = MixtureShape()

_ANSWERS: Final = 4096
"""Latencies that are drawn, and used again and again."""


@cache
def manifest_tensors(shape: MixtureShape = LONGCAT) -> tuple[Tensor, ...]:
    """What a version's manifest names."""
    digest = "5f" * 32
    return tuple(
        Tensor(name=name, dtype="BF16", shape=size, sha256=digest)
        for name, size in sorted(shape.tensors())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The run. Its fields are the options of the command; rates are of decimal bytes.

    Example: ``Size(workers=16, requests=3_200)``
    """

    workers: int = 512
    gpus_per_worker: int = 8
    requests: int = 100_000
    """Open at the same time: all that the bound lets in while a step trains."""
    slots: int = Workers().slots
    """Of one worker: whole contexts of 64K tokens that eight accelerators of 192 GB have room for
    beside the weights, about (`Size.contexts`)."""
    group_size: int = SIBLINGS
    max_staleness: int = 2
    in_flight_batches: float = 3.0
    max_tokens: int = 65_536
    """Longest response; lengths are those of DORA's step 100, stretched to it."""
    prompt_tokens: int = 2048
    turn_tokens: int = 2048
    """Sampled between two answers of a tool."""
    answer_tokens: int = 256
    answer_s: float = 10.0
    """Mean of a tool's latency and its deviation: ROLL Flash's N(10, 10) s (arXiv 2510.11345)."""
    trainer_gpus: int = 2048
    checkpoint_tokens: int = Workers().checkpoint_tokens
    failures_gpu_day: float = FAILURES_GPU_DAY
    changed_share: float = PATCHED_SHARE
    """Of the weights in a step; 0.5 to 3 % are published (arXiv 2602.03839, slime#1806)."""
    store_gb_s: float = 100.0
    """That all readers of the store share."""
    link_gb_s: float = 50.0
    """Of one worker's machine: one adapter of 400 Gb/s."""
    disk_gb_s: float = 20.0
    """Of one machine's own disks."""
    gpu_gb_s: float = 25.0
    """From the host's memory into one accelerator: half of what a link of PCIe 5 x16 has."""
    accelerator_gb: float = 192.0
    """Of one accelerator: eight of 80 GB do not hold the weights."""
    threads: int = HASHERS_MAX
    """That hash, compare and apply a version's tensors."""
    whole_every: int = 16
    keep_days: float = 7.0
    """How long trajectories stay on the brokers before they are archived."""
    steps: int = 4
    failures: int = 6
    """Workers that are lost in the modelled run: more than in so short a time, so that one can be
    measured."""

    @property
    def per_step(self) -> int:
        """Groups of a batch: while one trains, the bound lets in so many more."""
        return max(1, round(self.requests / self.group_size / (self.in_flight_batches - 1)))

    @property
    def gpus(self) -> int:
        """Of all workers."""
        return self.workers * self.gpus_per_worker

    @property
    def lengths(self) -> Lengths:
        """Of responses: a distribution as wide as the published one, for a higher cap."""
        stretched = math.log(self.max_tokens / STEP_100.cap)
        return replace(STEP_100, mu=STEP_100.mu + stretched, cap=self.max_tokens)

    @property
    def whole_bytes(self) -> float:
        """Of a version."""
        return float(LONGCAT.parameters * WIDTHS["bfloat16"])

    @property
    def patch_bytes(self) -> float:
        """Of what one step changes in it."""
        return LONGCAT.parameters * self.changed_share * PATCH_BYTES

    @property
    def contexts(self) -> float:
        """Longest contexts that a worker's accelerators have room for beside the weights."""
        room = self.gpus_per_worker * self.accelerator_gb * 1e9 * USABLE - self.whole_bytes
        return room / ((self.prompt_tokens + self.max_tokens) * LONGCAT.kv_bytes)

    @property
    def token_s(self) -> float:
        """Of training: six operations a parameter and token."""
        return 6 * LONGCAT.active / (self.trainer_gpus * FLOPS * UTILISATION)

    def sizes(self) -> list[WorkerSize]:
        """Every worker."""
        ahead = Workers().prefetch
        return [
            WorkerSize(name=f"w{one:05}", slots=self.slots, prefetch=ahead)
            for one in range(self.workers)
        ]

    def rates(self, load_s: float) -> EngineRates:
        """Of an engine with as many active parameters as that of the published runs (32B)."""
        return EngineRates(
            tau_s=FITTED.tau_s,
            rise=FITTED.rise,
            full=self.slots,
            kv_bytes=LONGCAT.kv_bytes,
            link_bytes_s=self.link_gb_s * 1e9,
            load_s=load_s,
        )

    def turns(self, seed: int) -> Turns:
        """Episodes with tools; how long one takes is a function of the trajectory and its turn."""

        chance = Random(seed)
        drawn = [max(0.0, chance.gauss(self.answer_s, self.answer_s)) for _ in range(_ANSWERS)]

        def answer_s(trajectory: str, done: int) -> float:
            return drawn[crc32(f"{trajectory}/{done}".encode()) % _ANSWERS]

        return Turns(tokens=self.turn_tokens, answer_s=answer_s, answer_tokens=self.answer_tokens)


QUICK: Final = {"workers": 16, "requests": 3_120, "trainer_gpus": 64, "steps": 3, "failures": 2}
"""What `--quick` changes: as many requests a worker, in seconds."""

LEASE_S: Final = Timing().lease_s

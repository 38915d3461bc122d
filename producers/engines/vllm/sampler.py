"""Sampler in vLLM's worker: seeds by position, both log-probs of a token, and routed experts.

vLLM's `enable_return_routed_experts` requires a model runner with another sampler, so its capturer
is read after every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.vllm.core import device_name, token_seed
from dora_pipe.producers.engines.vllm.wire import (
    BOTH,
    LOGPROB_TEMPERATURE,
    ROUTES_AS,
    policy_mark,
)
from dora_pipe.schemas.routes import GrowingRoutes, Routes


class ServerSampler(Sampler):  # type: ignore[misc]
    """Samples by seed and position, never an `unassigned` token id.

    Log-probs use the request's temperature. Each comes with the sampler's, under a token id that
    marks weights and adapter (`policy_mark`).
    """

    def __init__(self, runner: Any, weights: Any, unassigned: Sequence[int]) -> None:
        super().__init__("raw_logprobs")
        self._runner, self._weights = runner, weights
        self._unassigned = torch.tensor(unassigned, dtype=torch.int64)
        self._plain: Any = self.topk_topp_sampler
        self._both: Any = TopKTopPSampler("processed_logprobs")
        self._own_generator = device_name() == "cpu"
        self._chosen: Any = None
        """Sampler log-probs of this step, if a request needs them."""
        self.heard: KeptRoutes | None = None
        """Records experts, if enabled."""

    def forward(self, logits: Any, sampling_metadata: Any, *rest: Any, **named: Any) -> Any:
        if len(self._unassigned):
            self._unassigned = self._unassigned.to(logits.device)
            logits.index_fill_(-1, self._unassigned, -torch.inf)
        both = (sampling_metadata.max_num_logprobs or 0) >= BOTH  # one more softmax
        self.topk_topp_sampler: Any = self._both if both else self._plain
        self._chosen = None
        return super().forward(logits, sampling_metadata, *rest, **named)

    def gather_logprobs(self, logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
        """Return two log-probs per row in place of the most likely tokens' (vLLM's columns)."""
        batch = self._runner.input_batch
        adapters = torch.from_numpy(batch.request_lora_mapping[: len(token_ids)])
        marks = (policy_mark(self._weights.loaded, 0) - adapters).to(logprobs.device)
        own = logprobs.gather(-1, token_ids[:, None])
        chosen = own if self._chosen is None else self._chosen
        ids = torch.cat((token_ids[:, None], marks[:, None].expand(-1, num_logprobs)), dim=1)
        values = torch.cat((own, chosen.expand(-1, num_logprobs)), dim=1)
        return LogprobsTensors(ids.to(torch.int32), values, torch.zeros_like(token_ids))

    def compute_logprobs(self, logits: Any) -> Any:
        return super().compute_logprobs(_at_their_temperature(self._runner, logits))

    def sample(self, logits: Any, metadata: Any, override: Any = None) -> Any:
        """Draw a token for every row, in float32."""
        batch, requests = self._runner.input_batch, self._runner.requests
        for row, generator in metadata.generators.items():
            if self._own_generator and not isinstance(generator, _Seeded):
                generator = metadata.generators[row] = _Seeded()
            seed = requests[batch.req_ids[row]].sampling_params.seed
            generator.manual_seed(token_seed(seed, int(batch.num_tokens_no_spec[row])))
        sampled, processed = super().sample(logits, metadata, override)
        if processed is not None:
            self._chosen = processed.gather(-1, sampled.long().view(-1, 1))
        if self.heard is not None:
            self.heard.note()
        return sampled, None


class _Seeded(torch.Generator):
    """A CPU generator with offsets, which vLLM rewinds after partial prefills. Every token seeds
    again, so they have no effect."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def _at_their_temperature(runner: Any, logits: Any) -> Any:
    params = [runner.requests[name].sampling_params for name in runner.input_batch.req_ids]
    hot = [float((each.extra_args or {}).get(LOGPROB_TEMPERATURE, 1.0)) for each in params]
    if all(temperature == 1 for temperature in hot):
        return logits
    divisors = torch.tensor(hot, dtype=torch.float32, device=logits.device)
    return logits.to(torch.float32) / divisors[:, None]


KEPT_PER_SLOT: Final = 16
"""Remembered requests per slot; bounds clients that never report finished ones."""


class KeptRoutes:
    """Routed experts by name (`wire.ROUTES_AS`).

    Example: ``kept.part("3f-1", 40, 48)`` returns those of tokens 40 to 47.
    """

    def __init__(self, runner: Any) -> None:
        """Raises PolicyError if vLLM's kernel reports none."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        config, model = runner.vllm_config, runner.get_model()
        if not config.model_config.is_moe:
            raise PolicyError(
                "sampling.return_routed_experts: the model is not a mixture of experts",
                hint="remove the key",
            )
        if not config.model_config.enforce_eager:  # graphs precede the capturer
            raise PolicyError(
                "sampling.return_routed_experts: vLLM's compiled graphs report no routed experts",
                hint="workers.vllm.enforce_eager = true",
            )
        scheduler = config.scheduler_config
        self._runner = runner
        self._capturer = RoutedExpertsCapturer(scheduler.max_num_batched_tokens, config)
        self._experts = int(config.model_config.get_num_experts())
        self._layers = sorted(
            module.layer_id for module in model.modules() if isinstance(module, MoERunner)
        )
        self._most = KEPT_PER_SLOT * int(scheduler.max_num_seqs)
        self._kept: OrderedDict[str, GrowingRoutes | None] = OrderedDict()
        """Experts by name, least recently grown first; None: finished."""
        try:
            bind_routed_experts_capturer(model, self._capturer)
        except ValueError as error:
            raise PolicyError(
                f"sampling.return_routed_experts: {error}", hint="remove the key"
            ) from error

    def note(self) -> None:
        batch = self._runner.input_batch
        rows = len(batch.req_ids)
        ends = self._runner.query_start_loc.np[: rows + 1].tolist()
        chosen = self._capturer.snapshot_routing_data(ends[-1]).cpu().numpy()[:, self._layers]
        firsts = batch.num_computed_tokens_cpu[:rows].tolist()
        for row, request in enumerate(batch.req_ids):
            extra = self._runner.requests[request].sampling_params.extra_args or {}
            name = str(extra.get(ROUTES_AS, ""))
            growing = self._kept.setdefault(name, GrowingRoutes()) if name else None
            if growing is not None:
                routes = Routes.of(chosen[ends[row] : ends[row + 1]], self._experts)
                growing.note(firsts[row], routes)
                self._kept.move_to_end(name)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def part(self, name: str, start: int, end: int) -> Routes | None:
        """Return experts of tokens [start, end), or None."""
        growing = self._kept.get(name)
        return None if growing is None or growing.known < end else growing.between(start, end)

    def forget(self, name: str) -> None:
        self._kept[name] = None
        self._kept.move_to_end(name)

"""Sampler in vLLM's worker: seeds by position, and both log-probs of a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from dora_pipe.producers.engines.vllm.core import device_name, token_seed
from dora_pipe.producers.engines.vllm.routes import KeptRoutes
from dora_pipe.producers.engines.vllm.wire import BOTH, LOGPROB_TEMPERATURE, NO_TOKEN, SAMPLED_FROM


class ServerSampler(Sampler):  # type: ignore[misc]
    """Samples by seed and position, never an `unassigned` token id.

    Log-probs use the request's temperature. With adapters, a token's rank is its adapter's id.
    """

    def __init__(self, runner: Any, unassigned: Sequence[int]) -> None:
        super().__init__("raw_logprobs")
        self._runner = runner
        self._unassigned = torch.tensor(unassigned, dtype=torch.int64)
        self._plain: Any = self.topk_topp_sampler
        self._both: Any = TopKTopPSampler("processed_logprobs")
        self._own_generator = device_name() == "cpu"
        self._chosen: Any = None
        """Sampler log-probs of the last step."""
        self.heard: KeptRoutes | None = None
        """Records experts, if enabled."""

    def forward(self, logits: Any, sampling_metadata: Any, *rest: Any, **named: Any) -> Any:
        if len(self._unassigned):
            self._unassigned = self._unassigned.to(logits.device)
            logits.index_fill_(-1, self._unassigned, -torch.inf)
        both = (sampling_metadata.max_num_logprobs or 0) >= BOTH  # one more softmax
        self.topk_topp_sampler: Any = self._both if both else self._plain
        self._chosen = None
        output = super().forward(logits, sampling_metadata, *rest, **named)
        told = output.logprobs_tensors
        if self._chosen is not None:
            told.logprob_token_ids[:, 1] = SAMPLED_FROM
            told.logprob_token_ids[:, 2:] = NO_TOKEN  # else a duplicate with another rank
            told.logprobs[:, 1] = self._chosen
        if told is not None and self._runner.lora_config is not None:
            batch = self._runner.input_batch
            under = torch.from_numpy(batch.request_lora_mapping[: batch.num_reqs])
            told.selected_token_ranks.copy_(under)
        return output

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
            self._chosen = processed.gather(-1, sampled.long().view(-1, 1)).flatten()
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
    """Return logits at each request's log-prob temperature."""
    params = [runner.requests[name].sampling_params for name in runner.input_batch.req_ids]
    hot = [float((one.extra_args or {}).get(LOGPROB_TEMPERATURE, 1.0)) for one in params]
    if all(one == 1 for one in hot):
        return logits
    divisors = torch.tensor(hot, dtype=torch.float32, device=logits.device)
    return logits.to(torch.float32) / divisors[:, None]

"""The sampler that takes the place of vLLM's: seeds by position, and both log-probs of a token.

It runs in vLLM's worker, and what a request asks for decides what a step computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from dora_pipe.producers.engines.vllm.core import device_name, token_seed
from dora_pipe.producers.engines.vllm.routes import KeptRoutes
from dora_pipe.producers.engines.vllm.wire import (
    BOTH,
    LOGPROB_TEMPERATURE,
    NO_TOKEN,
    SAMPLED_FROM,
)


class ServerSampler(Sampler):  # type: ignore[misc]
    """Draws by seed and position, never an `unassigned` token id.

    Log-probs are those at the temperature that a request asks for. Where a request asks for both
    kinds, those of the distribution that was drawn from are sent beside them; where vLLM hosts
    adapters, the rank of a token is the id of the adapter that it was computed under.
    """

    def __init__(self, runner: Any, unassigned: Sequence[int]) -> None:
        super().__init__("raw_logprobs")
        self._runner = runner
        self._unassigned = torch.tensor(unassigned, dtype=torch.int64)
        self._plain: Any = self.topk_topp_sampler
        self._both: Any = TopKTopPSampler("processed_logprobs")
        self._own_generator = device_name() == "cpu"
        self._chosen: Any = None
        """Log-probs of the last step's tokens in what they were drawn from, on the device."""
        self.heard: KeptRoutes | None = None
        """Reads the experts of a step, if the engine reports them."""

    def forward(self, logits: Any, sampling_metadata: Any, *rest: Any, **named: Any) -> Any:
        """Sample a step; see vLLM's."""
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
            told.logprob_token_ids[:, 2:] = NO_TOKEN  # else the token again, of another rank
            told.logprobs[:, 1] = self._chosen
        if told is not None and self._runner.lora_config is not None:
            batch = self._runner.input_batch
            under = torch.from_numpy(batch.request_lora_mapping[: batch.num_reqs])
            told.selected_token_ranks.copy_(under)
        return output

    def compute_logprobs(self, logits: Any) -> Any:
        """Log-probs of the model's logits, one row per request; see vLLM's."""
        return super().compute_logprobs(_at_their_temperature(self._runner, logits))

    def sample(self, logits: Any, metadata: Any, override: Any = None) -> Any:
        """Draw a token for every row, in float32; see vLLM's."""
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
    """A generator on a CPU that lets vLLM take a draw back.

    vLLM does that where a prompt is not complete after a step, and torch's own generators have no
    offset on a CPU. Nothing depends on the offset: every token seeds them again.
    """

    def get_offset(self) -> int:
        """Return what vLLM subtracts from."""
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Ignore the offset."""
        return self


def _at_their_temperature(runner: Any, logits: Any) -> Any:
    """Return logits of the running batch whose softmax the log-probs of each request are of."""
    params = [runner.requests[name].sampling_params for name in runner.input_batch.req_ids]
    hot = [float((one.extra_args or {}).get(LOGPROB_TEMPERATURE, 1.0)) for one in params]
    if all(one == 1 for one in hot):
        return logits
    divisors = torch.tensor(hot, dtype=torch.float32, device=logits.device)
    return logits.to(torch.float32) / divisors[:, None]

"""Record the routed experts of vLLM's requests.

vLLM's `enable_return_routed_experts` requires a model runner with another sampler, so its capturer
is read after every step.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.vllm.wire import ROUTES_AS
from dora_pipe.schemas.routes import GrowingRoutes, Routes

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
        self._layers = sorted(one.layer_id for one in model.modules() if isinstance(one, MoERunner))
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
        """Record the current step."""
        batch = self._runner.input_batch
        rows = len(batch.req_ids)
        ends = self._runner.query_start_loc.np[: rows + 1].tolist()
        chosen = self._capturer.snapshot_routing_data(ends[-1]).cpu().numpy()[:, self._layers]
        firsts = batch.num_computed_tokens_cpu[:rows].tolist()
        for row, request in enumerate(batch.req_ids):
            told = self._runner.requests[request].sampling_params.extra_args or {}
            name = str(told.get(ROUTES_AS, ""))
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

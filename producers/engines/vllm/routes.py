"""Through which experts vLLM sends tokens; decides which of them are whose.

vLLM's routers hand what they choose to a capturer of its own, which has a place for each token of a
step. From there vLLM's own way to the caller (`enable_return_routed_experts`) begins in a model
runner that has another sampler than the one that `core` stands on. So the places are read here
after every step, and dealt to the rows of the batch in its order. Of a server, which runs ahead of
who reads its tokens, they are kept until they are asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.vllm.wire import ROUTES_AS
from dora_pipe.schemas.routes import GrowingRoutes, Routes

KEPT_PER_SLOT: Final = 16
"""Requests of a server whose experts are kept, or known to be wanted by nobody. Each that runs has
a slot; the others are bounded by who forgets to say that they are gone."""


class StepRoutes:
    """The experts of the last step, by stay; made in vLLM's worker.

    Example: ``first, routes = step.found["r/1"]`` is of the positions from `first` on.
    """

    def __init__(self, runner: Any) -> None:
        """Raises PolicyError where vLLM's kernel for experts does not say which it takes."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        config, model = runner.vllm_config, runner.get_model()
        if not config.model_config.is_moe:
            raise PolicyError(
                "sampling.routes: the model is no mixture of experts", hint="leave the key out"
            )
        if not config.model_config.enforce_eager:  # they were made before anybody listened
            raise PolicyError(
                "sampling.routes: vLLM's compiled graphs do not say which experts tokens go by",
                hint="workers.vllm.eager = true",
            )
        most = config.scheduler_config.max_num_batched_tokens
        self._runner = runner
        self._capturer = RoutedExpertsCapturer(most, config)
        self._experts = int(config.model_config.get_num_experts())
        self._layers = sorted(one.layer_id for one in model.modules() if isinstance(one, MoERunner))
        self.found: dict[str, tuple[int, Routes]] = {}
        try:
            bind_routed_experts_capturer(model, self._capturer)
        except ValueError as error:
            raise PolicyError(f"sampling.routes: {error}", hint="leave the key out") from error

    def note(self) -> None:
        """Read those of the step whose tokens are being sampled."""
        batch = self._runner.input_batch
        rows = len(batch.req_ids)
        ends = self._runner.query_start_loc.np[: rows + 1].tolist()
        chosen = self._capturer.snapshot_routing_data(ends[-1]).cpu().numpy()[:, self._layers]
        firsts = batch.num_computed_tokens_cpu[:rows].tolist()
        self.found = {
            stay: (firsts[row], Routes.of(chosen[ends[row] : ends[row + 1]], self._experts))
            for row, stay in enumerate(batch.req_ids)
        }


class KeptRoutes(StepRoutes):
    """The experts of a server's requests, by the names that these give (`wire.ROUTES_AS`)."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._most = KEPT_PER_SLOT * int(runner.vllm_config.scheduler_config.max_num_seqs)
        self._kept: OrderedDict[str, GrowingRoutes | None] = OrderedDict()
        """None: nobody wants them any more, though vLLM may still compute some. The one that grew
        longest ago first."""

    def note(self) -> None:
        super().note()
        for one, (first, routes) in self.found.items():
            told = self._runner.requests[one].sampling_params.extra_args or {}
            name = str(told.get(ROUTES_AS, ""))
            growing = self._kept.setdefault(name, GrowingRoutes()) if name else None
            if growing is not None:
                growing.note(first, routes)
                self._kept.move_to_end(name)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def part(self, name: str, start: int, end: int) -> Routes | None:
        """Of tokens [start, end); None where they are not kept."""
        growing = self._kept.get(name)
        return None if growing is None or growing.known < end else growing.between(start, end)

    def forget(self, name: str) -> None:
        """Nobody wants them."""
        self._kept[name] = None
        self._kept.move_to_end(name)


def install(core: Any, sampler: Any) -> StepRoutes:
    """Have vLLM's routers heard; what is heard is noted whenever the sampler has drawn."""

    def made(worker: Any) -> StepRoutes:
        return StepRoutes(worker.model_runner)

    (step,) = core.collective_rpc(made)
    sampler.heard = step
    found: StepRoutes = step
    return found

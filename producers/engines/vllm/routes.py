"""Through which experts vLLM in this process sends tokens; decides which of them are whose.

vLLM's routers hand what they choose to a capturer of its own, which has a place for each token of a
step. From there vLLM's own way to the caller (`enable_return_routed_experts`) begins in a model
runner that has another sampler than the one that `core` stands on. So the places are read here
after every step, and dealt to the rows of the batch in its order.
"""

from __future__ import annotations

from typing import Any

from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.routes import Routes


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


def install(core: Any, sampler: Any) -> StepRoutes:
    """Have vLLM's routers heard; what is heard is noted whenever the sampler has drawn."""

    def made(worker: Any) -> StepRoutes:
        return StepRoutes(worker.model_runner)

    (step,) = core.collective_rpc(made)
    sampler.heard = step
    found: StepRoutes = step
    return found

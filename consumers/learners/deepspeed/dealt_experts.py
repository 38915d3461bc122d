"""Expert parallelism: each layer's experts split over `size` consecutive ranks.

Token rows go to their experts' ranks and back (GShard, arXiv 2006.16668, section 3.3); the
network's own router and experts compute. ZeRO reduces and partitions among ranks with equal
experts. DeepSpeed's AutoEP replaces the whole block, for some families only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from dora_pipe.core.errors import PolicyError

KEY: Final = "trainer.expert_parallel_size"

NEAR: Final = 1e-4
"""Relative tolerance of split experts on a probe: summation order only."""

_PROBE_TOKENS: Final = 8


class DealtExperts:
    """This rank's experts; construction and later passes are collective."""

    def __init__(self, network: Any, size: int) -> None:
        """Raises PolicyError if the experts cannot be split."""
        self.size = size
        self._modules = list(_expert_modules(network))
        self.experts = self._modules[0].num_experts if self._modules else 0
        if not self.experts or self.experts % size:
            raise PolicyError(
                f"{KEY}: {self.experts} experts of {network.config.model_type} cannot be"
                f" split over {size} ranks",
                hint=f"leave {KEY} out, or choose a divisor of the experts",
            )
        self._name, self._group, self._replica = _groups(size)
        self.rank = dist.get_rank(self._group)
        width = int(network.config.get_text_config().hidden_size)
        places = torch.arange(_PROBE_TOKENS * width).float()
        hidden = torch.sin(places).reshape(_PROBE_TOKENS, width)  # some tokens
        if not all(self._deal(module, hidden) for module in self._modules):
            raise PolicyError(
                f"{KEY}: {network.config.model_type} gives different results with sharded experts",
                hint=f"leave {KEY} out",
            )
        dealt = [parameter for module in self._modules for parameter in module.parameters()]
        self._dealt = {id(parameter) for parameter in dealt}
        self.mark = _mark(self.experts) if dealt[0].requires_grad else None
        """Needed in ZeRO's module: DeepSpeed detects trained experts by it."""

    def _deal(self, module: Any, hidden: Tensor) -> bool:
        """Keep this rank's experts; return whether a probe [tokens, H] still agrees."""
        local = self.experts // self.size
        chosen = torch.arange(2 * len(hidden)).reshape(-1, 2) % local
        weights = torch.linspace(0.1, 0.9, chosen.numel()).reshape(chosen.shape)
        with torch.no_grad():
            before = module.forward(hidden, chosen + self.rank * local, weights)
        module.num_experts = local
        for parameter in module.parameters():
            parameter.data = self.part_of(parameter.data)
            parameter.ds_zero_partition_process_group = self._replica
            if parameter.requires_grad:
                parameter.allreduce = False
                parameter.group_name = parameter.ds_zero_partition_group_name = self._name
                parameter.ds_zero_placement_family = "autoep_expert"
        with torch.no_grad():
            rows = hidden.repeat_interleave(2, 0)
            after = _weighted(_computed(module.forward, rows, chosen.reshape(-1, 1)), weights)
        module.forward = self._exchanged(module.forward)
        return torch.allclose(before, after, rtol=NEAR, atol=NEAR * float(before.abs().max()))

    def is_dealt(self, parameter: Any) -> bool:
        return id(parameter) in self._dealt

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return a view of this rank's experts of a tensor [experts, ...]."""
        count = self.experts // self.size
        return tensor.narrow(0, self.rank * count, count)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the full shape of a split tensor."""
        return (shape[0] * self.size, *shape[1:])

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank with its experts."""
        return dist.get_rank(self._replica) == 0

    def groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the optimizer's groups with expert parameters separate, as ZeRO requires."""
        split: list[dict[str, Any]] = []
        for group in groups:
            shared = [parameter for parameter in group["params"] if not self.is_dealt(parameter)]
            dealt = [parameter for parameter in group["params"] if self.is_dealt(parameter)]
            split.append({**group, "params": shared})
            split.append({**group, "params": dealt, "moe": True, "name": self._name})
        return [group for group in split if group["params"]]

    def square_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of all experts' gradients; collective."""
        norms = torch.stack([gradient.norm() for gradient in gradients])
        total = norms.square().sum()
        dist.all_reduce(total, group=self._group)
        return total

    def _exchanged(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        local, group = self.experts // self.size, self._group
        cross: Any = _Crossed.apply

        def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            """Map tokens [T, H] with experts and weights [T, K] to [T, H]."""
            per_token = chosen.shape[1]
            experts = chosen.reshape(-1)
            order = torch.argsort(experts, stable=True)
            counts = torch.bincount(experts // local, minlength=self.size)
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts, group=group)
            sent, received = counts.tolist(), arriving.tolist()
            rows = cross(hidden[order // per_token], sent, received, group)
            whose = crossed((experts[order] % local).unsqueeze(1), sent, received, group)
            done = cross(_computed(compute, rows, whose), received, sent, group)
            return _weighted(torch.zeros_like(done).index_copy(0, order, done), weights)

        return forward


def _weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum rows [T * K, H] by weights [T, K] to [T, H]."""
    apart = rows.reshape(*weights.shape, -1) * weights.unsqueeze(-1)
    return apart.sum(1).to(rows.dtype)


def _computed(compute: Callable[..., Tensor], rows: Tensor, whose: Tensor) -> Tensor:
    """A zero row gives a rank without tokens a backward path; others would hang."""
    rows = torch.cat((rows, rows.new_zeros((1, rows.shape[1]))))
    whose = torch.cat((whose, whose.new_zeros((1, 1))))
    ones = torch.ones_like(whose, dtype=rows.dtype)
    return compute(rows, whose, ones)[:-1]


class _Crossed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.back = (received, sent, group)
        return crossed(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return crossed(gradients[0], *ctx.back), None, None, None


def crossed(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Exchange rows [N, H] in a group (None: all ranks), `sent` per rank, in rank order. As bytes:
    gloo lacks some types."""
    output = rows.new_empty((sum(received), rows.shape[1]))
    arrived, sent_bytes = output.view(torch.uint8), rows.contiguous().view(torch.uint8)
    dist.all_to_all_single(arrived, sent_bytes, received, sent, group=group)
    return output


def _expert_modules(network: Any) -> Iterator[Any]:
    """Yield the modules whose tensors are all [experts, ...]."""
    for module in network.modules():
        count = getattr(module, "num_experts", 0)
        own = list(module.parameters(recurse=False))
        if any(parameter.ndim == 3 for parameter in own) and all(
            len(parameter) == count for parameter in own
        ):
            yield module


def _groups(size: int) -> tuple[str, Any, Any]:
    """Return DeepSpeed's group name, the group sharing experts, and the replicas."""
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    name = f"ep_size_{size}"
    groups._create_expert_and_data_parallel(size)
    return (
        name,
        groups._get_expert_parallel_group(name),
        groups._get_expert_data_parallel_group(name),
    )


def _mark(experts: int) -> torch.nn.Module:
    """Return an inert layer of the class by which DeepSpeed detects experts."""
    layer: Any = importlib.import_module("deepspeed.module_inject.auto_ep_layer").AutoEPMoELayer

    class Mark(layer):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.num_experts = experts

        def set_deepspeed_parallelism(self, *given: Any, **named: Any) -> None:
            """Keep our groups."""

    return Mark()

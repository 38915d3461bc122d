"""Routing through recorded experts (rollout routing replay, arXiv 2510.11370).

Near ties, equal weights choose different experts, and log-probs differ by more than rounding. Only
the choice (`topk` over all experts' scores) is replaced; scores and gradients stay the network's
own. A probe checks that a family works so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dora_pipe.consumers.learners.torch.memory import decoder_layers
from dora_pipe.core.errors import PolicyError

_TOPK: Final = (torch.topk, torch.Tensor.topk)
_PROBE_TOKENS: Final = 4


class RoutedExperts:
    """Blocks with experts of a network; routes hold until the next `take`, also for
    recomputation."""

    def __init__(self, network: Any) -> None:
        """Raises PolicyError for an unsupported network."""
        self._routes: Tensor | None = None
        self.differing = self.seen = 0
        """Recorded choices that differ from the router's, and all (one per token and layer)."""
        self._blocks = list(_sparse_blocks(network))
        config = network.config.get_text_config()
        self.per_token = int(getattr(config, "num_experts_per_tok", 0) or 0)
        self.experts = _experts(config)
        self._found = [0] * len(self._blocks)
        for number, block in enumerate(self._blocks):
            block.forward = self._routed(number, block.forward)
        self._need_choices(network)

    @property
    def layers(self) -> int:
        return len(self._blocks)

    def take(self, routes: Tensor | None) -> None:
        """Set experts of the next passes, [tokens, layers, per_token] int64, -1: router's choice.
        Raises PolicyError."""
        if routes is not None:
            shape, expected = tuple(routes.shape[1:]), (self.layers, self.per_token)
            if shape != expected or (len(routes) and int(routes.max()) >= self.experts):
                raise PolicyError(
                    f"experts of {shape[0]} layers, {shape[1]} for a token, are in the record; the"
                    f" model has {self.layers} layers of {self.experts}, and {self.per_token} each"
                )
        self._routes = routes

    def _routed(self, number: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*given: Any, **named: Any) -> Any:
            if self._routes is None:
                return compute(*given, **named)
            with _Choosing(self, number):
                return compute(*given, **named)

        return forward

    def choice(self, number: int, scores: Tensor, own: Tensor) -> Tensor:
        """Return the experts [tokens, per_token] of a layer; `own` is the router's choice."""
        assert self._routes is not None
        self._found[number] += 1
        logged = self._routes[:, number]
        if len(logged) != len(scores):
            raise PolicyError(f"experts of {len(logged)} tokens for {len(scores)}")
        there = logged >= 0
        is_known = there[:, 0]
        if not torch.is_grad_enabled():
            odd = (logged.sort(-1).values != own.sort(-1).values).any(-1) & is_known
            self.differing += int(odd.sum())
            self.seen += int(is_known.sum())
        return torch.where(there, logged, own)

    def is_choice(self, scores: Any, count: Any) -> bool:
        return (
            isinstance(scores, Tensor)
            and scores.dim() == 2
            and scores.shape[1] == self.experts
            and count == self.per_token
        )

    def _need_choices(self, network: Any) -> None:
        if not (self._blocks and self.per_token and self._chooses(network)):
            raise PolicyError(
                f"this {network.config.model_type} does not support recorded routing",
                hint="sampling.return_routed_experts = false",
            )
        self.differing = self.seen = 0

    def _chooses(self, network: Any) -> bool:
        ids = torch.arange(_PROBE_TOKENS).reshape(1, -1) % network.config.vocab_size
        ids = ids.to(next(network.parameters()).device)
        shape = (_PROBE_TOKENS, self.layers, self.per_token)
        with torch.no_grad():
            before = network(input_ids=ids, use_cache=False).logits
            self.take(torch.full(shape, -1, device=ids.device))
            after = network(input_ids=ids, use_cache=False).logits
        self.take(None)
        same = torch.equal(before, after) or not bool(before.isfinite().all())
        return self._found == [1] * self.layers and same


class BalanceLoss:
    """Router load-balancing loss by transformers' own function (Switch Transformer, arXiv
    2101.03961, equations 4 to 6).

    Per sequence: a product of two token means does not add up over passes.
    """

    def __init__(self, network: Any) -> None:
        """Raises PolicyError for an unsupported family."""
        of_family = sys.modules[type(network).__module__]
        self._function: Any = getattr(of_family, "load_balancing_loss_func", None)
        blocks = list(_sparse_blocks(network))
        routers = [
            module
            for block in blocks
            for module in block.modules()
            if type(module).__name__.endswith("Router")
        ]
        if self._function is None or not blocks or len(routers) != len(blocks):
            raise PolicyError(
                f"trainer.router_aux_loss: transformers has no load-balancing loss for"
                f" {network.config.model_type}",
                hint="remove the key",
            )
        config = network.config.get_text_config()
        self._sizes = _experts(config), int(config.num_experts_per_tok)
        self._layers = len(routers)
        self._noted: list[Tensor] | None = None
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, module: Any, inputs: Any, output: Any) -> None:
        if self._noted is not None:
            self._noted.append(output[0])

    def beside(
        self,
        logprobs: Callable[[], Tensor],
        spans: Sequence[tuple[int, int]],
        weights: Sequence[float],
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs of a pass, and the weighted loss of its sequences at [start, end)."""
        logits: list[Tensor] = []
        self._noted = logits
        try:
            result = logprobs()
        finally:  # do not record recomputation
            self._noted = None
        assert len(logits) == self._layers, "another computation interfered"
        losses = [
            self._function(tuple(logit[start:end] for logit in logits), *self._sizes)
            for start, end in spans
        ]
        return result, (torch.stack(losses) * torch.tensor(weights, device=result.device)).sum()


def balance_numerics(weight: float) -> dict[str, str]:
    return {"router_aux_loss": repr(weight)} if weight else {}


class _Choosing(TorchFunctionMode):
    """Replaces a block's expert choice by the recorded one."""

    def __init__(self, routed: RoutedExperts, number: int) -> None:
        super().__init__()
        self._of, self._number = routed, number

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if func not in _TOPK:
            return result
        scores: Any = args[0] if args else named.get("input")
        if not self._of.is_choice(scores, args[1] if len(args) > 1 else named.get("k")):
            return result
        choice = self._of.choice(self._number, scores, result[1])
        return torch.return_types.topk((scores.gather(-1, choice), choice))


def _sparse_blocks(network: Any) -> Iterator[Any]:
    for layer in decoder_layers(network):
        for child in layer.children():
            if any("expert" in name for name, _ in child.named_modules()):
                yield child


def _experts(config: Any) -> int:
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        count = getattr(config, name, None)
        if count:
            return int(count)
    return 0

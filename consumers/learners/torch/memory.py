"""Memory options of a step, and chunked log-probs of a head.

Logits of 16,384 tokens and 152,000 words take 10 GB in float32, several times over in backward.
Chunks are recomputed instead (as Liger's fused cross entropy, arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from dora_pipe.config.training import Trainer
from dora_pipe.consumers.learners.settings import MASKED, VARLEN
from dora_pipe.core.errors import PolicyError

HEAD_ELEMENTS: Final = 2**24
"""Logits per automatic chunk: 67 MB in float32, about four copies at once."""

MLP_ELEMENTS: Final = 2**22
"""Tokens times width per automatic chunk: 17 MB in float32, about eight copies at once."""

MLP_ELEMENTS_MIN: Final = 2**24
"""Smallest pass that is chunked automatically."""

MLP_ELEMENTS_GPU: Final = 2**25
"""Same on a GPU, where smaller kernels are launch-bound."""

MLP_ELEMENTS_MIN_GPU: Final = 2**26
"""Smallest pass that is chunked automatically on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Memory options; see `dora_pipe.config.training.Trainer`."""

    head_chunk_tokens: int | Literal["auto"] = 0
    """Tokens per chunk of logits; 0: all."""
    mlp_chunk_tokens: int | Literal["auto"] = 0
    """Tokens per chunk of a layer's block and norms; 0: all."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input."""
    activation_offload: bool = False
    """Keep these inputs in host memory."""
    packing: bool = False

    def head_chunk(self, vocabulary: int) -> int:
        """Return the tokens per head chunk; 0: all."""
        if self.head_chunk_tokens == "auto":
            return max(1, HEAD_ELEMENTS // vocabulary)
        return self.head_chunk_tokens

    def head_chunks(self, tokens: int, vocabulary: int) -> int:
        return _count(tokens, self.head_chunk(vocabulary))

    def mlp_chunk(self, tokens: int, width: int, device: str = "cpu") -> int:
        """Return the tokens per chunk of a block of this width; 0: all."""
        if self.mlp_chunk_tokens != "auto":
            return self.mlp_chunk_tokens
        on_gpu = device.startswith("cuda")
        at_once = MLP_ELEMENTS_GPU if on_gpu else MLP_ELEMENTS
        least = MLP_ELEMENTS_MIN_GPU if on_gpu else MLP_ELEMENTS_MIN
        return max(1, at_once // width) if tokens * width > least else 0

    def mlp_chunks(self, tokens: int, width: int, device: str = "cpu") -> int:
        return _count(tokens, self.mlp_chunk(tokens, width, device))

    def numerics(
        self,
        vocabulary: int,
        width: int,
        pass_tokens: int,
        device: str = "cpu",
        *,
        varlen: bool = False,
    ) -> dict[str, str]:
        """Return fingerprint entries of options that change how a pass of `pass_tokens` is
        computed.

        `width` is that of dense blocks, 0 without any; `varlen`: attention per sequence.
        """
        chunks = {
            "head_chunk_tokens": self.head_chunk(vocabulary),
            "mlp_chunk_tokens": self.mlp_chunk(pass_tokens, width, device) if width else 0,
        }
        cut = {key: str(chunk) for key, chunk in chunks.items() if 0 < chunk < pass_tokens}
        return cut | ({"packing": VARLEN if varlen else MASKED} if self.packing else {})


def _count(tokens: int, chunk: int) -> int:
    return -(-tokens // chunk) if chunk else 1


def memory_options(section: Trainer) -> MemoryOptions:
    return MemoryOptions(
        head_chunk_tokens="auto",
        mlp_chunk_tokens=0 if section.chunks_refused else "auto",
        gradient_checkpointing=bool(section.gradient_checkpointing),
        activation_offload=section.gradient_checkpointing == "offload",
        packing=section.packing,
    )


_PROBE_TOKENS: Final = 4

AT_ONCE: Final = MemoryOptions()
"""Least computation, most memory."""


def decoder_layers(network: Any) -> list[Any]:
    """Return the layers that transformers can checkpoint."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)
    ]


def checkpoint_layers(network: Any, *, offload: bool = False) -> None:
    """Checkpoint each layer, with equal bits; `offload` keeps inputs on the host. Raises
    PolicyError for a network with dropout or without such layers."""
    layers = decoder_layers(network)
    ids = torch.arange(_PROBE_TOKENS).reshape(1, -1) % network.config.vocab_size
    with torch.no_grad():
        before = network(input_ids=ids, use_cache=False).logits
        try:
            network.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise PolicyError(f"trainer.gradient_checkpointing: {error}") from error
        for layer in layers:
            layer.training = True  # for these modules only: their children would apply dropout
            if offload:
                layer._gradient_checkpointing_func = _offloaded(layer._gradient_checkpointing_func)
        after = network(input_ids=ids, use_cache=False).logits
    if not layers or not torch.equal(before, after):
        raise PolicyError(
            "trainer.gradient_checkpointing: this model has no layers that can be computed again"
            " without dropout",
            hint="set the dropout of its config.json to 0, or remove the key",
        )


def _offloaded(compute: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(*given: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return compute(*given)

    return checkpointed


class UnassignedRows:
    """Logit columns of ids without a token (`store.model_dir`)."""

    def __init__(self, ids: Sequence[int], vocabulary: int) -> None:
        self.count = len(ids)
        self._mask = torch.zeros(vocabulary, dtype=torch.bool)
        self._mask[list(ids)] = True

    def leave_out(self, logits: Tensor) -> Tensor:
        """Mask these columns of logits [N, V] with -inf; in place only without a gradient, since
        ZeRO returns views."""
        if not self.count:
            return logits
        if self._mask.device != logits.device:
            self._mask = self._mask.to(logits.device)
        if logits.requires_grad:
            return logits.masked_fill(self._mask, -torch.inf)
        return logits.masked_fill_(self._mask, -torch.inf)

    @property
    def numerics(self) -> dict[str, str]:
        return {"unassigned_ids": str(self.count)} if self.count else {}


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return log-probs of `targets` [N] for logits [N, V]; float32."""
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    return -cross_entropy(logits, targets, reduction="none")


def head_logprobs(
    head: Any,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunks: int,
    unassigned: UnassignedRows | None = None,
) -> Tensor:
    """Return float32 log-probs of `targets` [N] from hidden states [N, H], chunked; chunks may be
    empty."""
    unassigned = unassigned or UnassignedRows((), 0)
    if chunks <= 1:
        return token_logprobs(unassigned.leave_out(head(hidden)), targets, temperature)
    # Exactly x W^T + b: no adapter, no hook that gathers weights.
    if type(head) is torch.nn.Linear and not (head._forward_hooks or head._forward_pre_hooks):
        logprobs: Tensor = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, head.bias, targets, temperature, chunks, unassigned
        )
        return logprobs
    return _checkpointed(
        lambda part: unassigned.leave_out(head(part)), hidden, targets, temperature, chunks
    )


def _checkpointed(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    chunks: int,
) -> Tensor:
    """Peak memory adds one chunk's weight gradient."""

    def compute(part: Tensor, chosen: Tensor) -> Tensor:
        return token_logprobs(head(part), chosen, temperature)

    # No early stop: weight gathering hooks the end of forward, also in recomputation.
    logprobs = [
        checkpoint(
            compute,
            hidden[part],
            targets[part],
            use_reentrant=False,
            preserve_rng_state=False,
            early_stop=False,
        )
        for part in chunk_slices(len(targets), chunks)
    ]
    return torch.cat(logprobs)


def chunk_slices(tokens: int, count: int) -> Iterator[slice]:
    """Yield nearly equal slices: products of a single row may sum in another order."""
    for number in range(count):
        yield slice(tokens * number // count, tokens * (number + 1) // count)


def computed_in(hidden: Tensor) -> torch.dtype:
    """Return the dtype of products of these states, which autocast may set."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _as(kind: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.to(kind), None if bias is None else bias.to(kind)


class _LinearLogprobs(torch.autograd.Function):
    """Accumulates weight gradients in float32, in place, chunk by chunk.

    Backward runs outside autocast, so forward saves its dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunks: int,
        unassigned: UnassignedRows,
    ) -> Tensor:
        ctx.temperature, ctx.chunks, ctx.given = temperature, chunks, hidden.dtype
        ctx.unassigned = unassigned
        computed = computed_in(hidden)
        hidden = hidden.to(computed)
        ctx.save_for_backward(hidden, weight, bias, targets)
        weight, bias = _as(computed, weight, bias)
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        for part in chunk_slices(len(targets), chunks):
            logits = unassigned.leave_out(linear(hidden[part], weight, bias))
            logprobs[part] = token_logprobs(logits, targets[part], temperature)
        return logprobs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, held, held_bias, targets = ctx.saved_tensors
        weight, bias = _as(hidden.dtype, held, held_bias)
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(tensor, dtype=dtype) if needed else None
            for tensor, needed, dtype in zip(
                (hidden, weight, bias),
                ctx.needs_input_grad,
                (ctx.given, torch.float32, torch.float32),
                strict=False,
            )
        )
        for part in chunk_slices(len(targets), ctx.chunks):
            with torch.enable_grad():
                logits = linear(hidden[part], weight, bias).detach()
                logits = ctx.unassigned.leave_out(logits).requires_grad_()
                logprobs = token_logprobs(logits, targets[part], ctx.temperature)
            (by_logits,) = torch.autograd.grad(logprobs, logits, gradient[part])
            del logits, logprobs
            if of_hidden is not None:
                of_hidden[part] = by_logits @ weight
            if of_weight is not None:
                if held.dtype == hidden.dtype:
                    of_weight.addmm_(by_logits.float().T, hidden[part].float())
                else:  # match autocast: products in the compute dtype
                    of_weight += by_logits.T @ hidden[part]
            if of_bias is not None:
                of_bias += by_logits.float().sum(0)
            del by_logits
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(held.dtype),
            None if of_bias is None else of_bias.to(held_bias.dtype),
            *(None,) * 4,
        )

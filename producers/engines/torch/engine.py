"""The own engine: continuous batching of a Hugging Face causal model in float32 on a CPU.

It decides which requests enter a step and when one ends; `model` decides the shapes,
`kv` where keys lie, `sampling` which token is drawn.

A step in order: rows that outgrew their pool move on; waiting requests enter, and as many of their
prompt tokens as fit are prefilled together with one token of every row whose prompt is complete;
one token is drawn for each of these; requests that end leave their slot.

Bits: the logits of a row depend on its tokens alone (see `model`), whatever runs beside it
and wherever it was interrupted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dora_pipe.core.clock import Clock, SystemClock
from dora_pipe.core.errors import ConfigError, PolicyError, ResourceError
from dora_pipe.producers.engines.port import (
    BATCH_INVARIANT,
    COUNTER_SAMPLING,
    INTERRUPTIBLE,
    KV_EXPORT,
    LORA,
    PREFILL_EXACT,
    EngineEvent,
    EngineRequest,
    Exported,
    Kv,
    WeightsLoaded,
)
from dora_pipe.producers.engines.requests import (
    check_request,
    kv_array_mismatch,
    kv_mismatch,
    stop_text,
)
from dora_pipe.producers.engines.slots import Integers, SlotTable
from dora_pipe.producers.engines.stops import Decode
from dora_pipe.producers.engines.torch import probe as torch_probe
from dora_pipe.producers.engines.torch.attention import Piece, Run, StepAttention, split_pieces
from dora_pipe.producers.engines.torch.causal_lm import CausalLM, read_causal_lm
from dora_pipe.producers.engines.torch.kv import KvCache
from dora_pipe.producers.engines.torch.lora import Residents, is_invariant
from dora_pipe.producers.engines.torch.model import ROWS_MIN, Weights, forward, fuse, rotations
from dora_pipe.producers.engines.torch.sampling import Sampler
from dora_pipe.producers.engines.torch.weights import (
    check_tensors,
    random_tensors,
    read_tensors,
    weight_files,
)

PREFILL_TOKENS_MAX = 512
"""Prompt tokens of one step; a longer prompt is prefilled over several."""

KV_ARRAY = "kv"
"""The one array of an exported cache: [layers, 2, kv_heads, tokens, head_dim], keys first."""


class TorchEngine:
    """See the module, and `open`.

    Example::

        engine = TorchEngine.open(Path("model"), slots=64, context_tokens=1024, threads=1)
        engine.add(EngineRequest(request="r", token_ids=[1, 5], sampled=0, seed=9, params=params))
        while engine.active:
            events = engine.step()
    """

    name = "torch"
    device = "cpu"
    dtype = "float32"

    def __init__(
        self,
        model: CausalLM,
        weights: Weights | None,
        *,
        slots: int,
        context_tokens: int,
        digest: str = "",
        declares: frozenset[str] = frozenset({COUNTER_SAMPLING}),
        decode: Decode | None = None,
        clock: Clock | None = None,
        lora_rank: int = 0,
        versions_resident: int = 1,
    ) -> None:
        self.version = str(torch.__version__)
        self.declares = declares
        self.slots = slots
        self.context_tokens = context_tokens
        self.versions_resident = versions_resident
        self._model = model
        self._weights = weights
        self._residents = Residents(
            model, slots=slots, rank=lora_rank, most=versions_resident, base=digest
        )
        self._layout = _layout(model)
        self._decode = decode
        self._clock = clock or SystemClock()
        self._kv = KvCache(model, slots=slots, context_tokens=context_tokens)
        self._turns = rotations(model, context_tokens)[:, None]
        self._sampler = Sampler(slots=slots)
        self._table = SlotTable(slots=slots, context_tokens=context_tokens)
        self._free = list(range(slots - 1, -1, -1))
        self._slot_of: dict[str, int] = {}
        self._waiting: deque[int] = deque()
        """Slots whose prompt is not complete in the cache, in the order they came."""
        self._changed = False

    @classmethod
    def open(
        cls,
        model_dir: Path,
        *,
        slots: int,
        context_tokens: int,
        threads: int,
        decode: Decode | None = None,
        lora_rank: int = 0,
        versions_resident: int = 1,
    ) -> TorchEngine:
        """An engine for a model directory, with its weights if it holds any (else `load` some).

        With `lora_rank`, up to `versions_resident` versions live beside each other, as adapters of
        that rank on one base. `decode` gives the text of tokens; without it requests with stop
        strings are refused.
        Sets the number of torch's threads in this process. Raises PolicyError for a model that
        the engine does not take, ConfigError for sizes that cannot be, ResourceError.
        """
        if min(slots, context_tokens, threads) < 1:
            raise ConfigError("an engine needs at least one slot, one token and one thread")
        torch.set_num_threads(threads)
        model = read_causal_lm(model_dir, context_tokens=context_tokens)
        files = weight_files(model_dir)
        weights, digest = _read_weights(model, files, model_dir) if files else (None, "")
        try:
            return cls(
                model,
                weights,
                slots=slots,
                context_tokens=context_tokens,
                digest=digest,
                declares=_measured(model, weights, lora_rank),
                decode=decode,
                lora_rank=lora_rank,
                versions_resident=versions_resident,
            )
        except MemoryError as error:
            raise ResourceError(
                f"no memory for the keys of {slots} slots of {context_tokens} tokens",
                hint="fewer slots, or a shorter context",
            ) from error

    def load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        """See the port."""
        whole = self._residents.is_whole(weights, digest)
        if self._slot_of and (whole or self.versions_resident == 1):
            raise ValueError(f"{self.active} rows are active; weights change between requests")
        if not whole:
            started_ns = self._clock.now_ns()
            self._residents.take(weights, version=version, digest=digest)
            load_ms = (self._clock.now_ns() - started_ns) / 1e6
            return WeightsLoaded(version=version, digest=digest, load_ms=load_ms)
        return self._load(weights, version=version, digest=digest)

    def drop(self, version: int) -> None:
        """See the port."""
        self._residents.drop(version)

    def reload_keeping(self, weights: Path, *, version: int, digest: str) -> list[EngineEvent]:
        """See the port; the next steps prefill all rows again, as many tokens each as ever."""
        if INTERRUPTIBLE not in self.declares:
            raise ValueError("versions of a LoRA policy live beside each other")
        loaded = self._load(weights, version=version, digest=digest)
        slots = self._table.by_arrival(self._slot_of.values())
        pending = [self._table.pending(slot) for slot in slots]
        self._waiting.clear()
        for slot in slots:
            self._kv.release(slot)
            self._table.prefill_again(slot)
            self._waiting.append(slot)
        self._changed = True
        return [*(one for one in pending if one is not None), loaded]

    def _load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        started_ns = self._clock.now_ns()
        fresh, found = _read_weights(self._model, [weights], weights)
        if found != digest:
            raise PolicyError(
                f"{weights} has the weights digest {found[:16]}, not {digest[:16]} of version"
                f" {version}"
            )
        self._weights = fresh
        self._residents.settle(version, digest)
        load_ms = (self._clock.now_ns() - started_ns) / 1e6
        return WeightsLoaded(version=version, digest=digest, load_ms=load_ms)

    def add(self, request: EngineRequest) -> None:
        """See the port."""
        check_request(
            request, running=self._slot_of, slots=self.slots, context_tokens=self.context_tokens
        )
        if self._weights is None:
            raise ValueError(f"{request.request}: no weights are loaded")
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self._model.vocabulary:
            raise ValueError(
                f"{request.request}: token ids beyond a vocabulary of {self._model.vocabulary}"
            )
        version = self._residents.version_of(request)
        misfit = self.kv_error(request)
        if misfit is not None:
            raise ValueError(f"{request.request}: its KV cache is of {misfit}")
        stops, kv = stop_text(request, self._decode), request.kv
        slot = self._free.pop()
        self._slot_of[request.request] = slot
        self._residents.seat(slot, version)
        self._table.enter(slot, request, stops, cached=kv.tokens if kv else 0)
        if kv is not None:
            self._kv.adopt(slot, torch.from_numpy(kv.arrays[KV_ARRAY]))
        self._sampler.set(slot, request.params, request.seed)
        self._waiting.append(slot)

    def kv_error(self, request: EngineRequest) -> str | None:
        """See the port."""
        kv = request.kv
        if kv is None or not self._residents.knows(request):
            return None
        weights = self._residents.digest_of(self._residents.version_of(request))
        misfit = kv_mismatch(request, kv, layout=self._layout, weights=weights)
        if misfit is not None:
            return misfit
        model = self._model
        shape = (model.layers, 2, model.kv_heads, kv.tokens, model.head_dim)
        return kv_array_mismatch(kv, KV_ARRAY, dtype="<f4", shape=shape)

    def export(self, request: str) -> Exported | None:
        """See the port. Its cache is complete as soon as its prompt is."""
        slot = self._slot_of.get(request)
        if slot is None:
            return None
        pending, tokens, kv = self._table.pending(slot), int(self._table.length[slot]) - 1, None
        if tokens and self._table.cached[slot] == tokens:
            array = self._kv.copied(slot, tokens).numpy()
            digest = self._residents.digest_in(slot)
            kv = Kv(tokens=tokens, layout=self._layout, weights=digest, arrays={KV_ARRAY: array})
        self._leave(slot)
        return Exported(sampled=pending, kv=kv)

    def cancel(self, request: str) -> None:
        """See the port."""
        slot = self._slot_of.get(request)
        if slot is not None:
            self._leave(slot)

    def step(self) -> list[EngineEvent]:
        """See the port; a prompt beyond PREFILL_TOKENS_MAX is prefilled over several steps."""
        if not self._slot_of:
            return []
        runs = self._arrange()
        order = self._kv.order
        positions = self._table.length[order] - 1
        with torch.inference_mode():
            logits = self._forward(order, positions, runs)
            if not len(order):
                return []
            drawn = self._sampler.draw(logits[: len(order)], order, positions + 1)
        events, ended = self._table.take(order, drawn, self._clock.wall_ns)
        for slot in ended:
            self._leave(slot)
        return events

    @property
    def kv_tokens(self) -> int:
        """See the port."""
        return self.slots * self.context_tokens

    @property
    def active(self) -> int:
        """See the port."""
        return len(self._slot_of)

    @property
    def kv_used_tokens(self) -> int:
        """See the port."""
        return int(self._table.cached[list(self._slot_of.values())].sum())

    def close(self) -> None:
        """Let go of the memory; the engine cannot be used any more."""
        for request in list(self._slot_of):
            self.cancel(request)
        self._weights = None
        del self._kv

    def _leave(self, slot: int) -> None:
        """Free the slot."""
        if slot in self._waiting:
            self._waiting.remove(slot)
        self._kv.release(slot)
        del self._slot_of[self._table.leave(slot)]
        self._free.append(slot)
        self._changed = True

    def _arrange(self) -> list[Run]:
        """Let rows move and enter; the prompt tokens to prefill in this step."""
        table, kv = self._table, self._kv
        outgrown = kv.order[table.length[kv.order] > kv.room]
        entering = [(int(s), int(table.length[s]) - 1) for s in outgrown if kv.is_dense(int(s))]
        pieces, budget = [], PREFILL_TOKENS_MAX
        while self._waiting and budget:
            slot = self._waiting[0]
            start, end = int(table.cached[slot]), int(table.length[slot]) - 1
            if end - start <= budget:
                self._waiting.popleft()
                entering.append((slot, end))
            else:
                end = start + budget
            pieces.append(Piece(slot=slot, start=start, end=end))
            budget -= end - start
        if entering or self._changed:
            kv.settle(entering, table.cached)
            self._changed = False
        if pieces and self._waiting and pieces[-1].slot == self._waiting[0]:
            kv.stage(self._waiting[0], int(table.length[self._waiting[0]]) - 1)
        for piece in pieces:
            table.cached[piece.slot] = piece.end
        return split_pieces(kv, pieces)

    def _forward(self, order: Integers, positions: Integers, runs: Sequence[Run]) -> torch.Tensor:
        """Logits of the rows of `order`, after prefilling `runs`; see `model.forward`."""
        assert self._weights is not None
        table = self._table
        tokens = [table.last[order], *(table.prompts[r.slot][r.start : r.end] for r in runs)]
        places = [positions, *(np.arange(r.start, r.end) for r in runs)]
        slots = [order, *(np.full(r.end - r.start, r.slot) for r in runs)]
        padding = np.zeros(max(0, ROWS_MIN - sum(map(len, places))), np.int64)
        return forward(
            self._weights,
            torch.from_numpy(np.concatenate([*tokens, padding])),
            self._turns[torch.from_numpy(np.concatenate([*places, padding]))],
            StepAttention(self._kv, positions, runs),
            len(order),
            self._residents.rows_of(np.concatenate(slots)),
        )


def _layout(model: CausalLM) -> str:
    """Names how this engine arranges keys: turned, the halves of each head interleaved."""
    return f"torch-1 {model.family} {model.layers}x{model.kv_heads}x{model.head_dim}"


def _read_weights(model: CausalLM, files: Sequence[Path], where: Path) -> tuple[Weights, str]:
    """The weights in these files, checked against the model, and their digest."""
    tensors, digest = read_tensors(files)
    check_tensors(model, tensors, where)
    return fuse(model, tensors), digest


def _measured(model: CausalLM, weights: Weights | None, lora_rank: int) -> frozenset[str]:
    """What an engine for this model may declare on this machine; see `probe`."""
    if weights is None:
        one = replace(model, layers=1)
        weights = fuse(one, random_tensors(one, seed=0))
    part = torch_probe.small(weights)
    engine = TorchEngine(
        part.model, part, slots=torch_probe.SLOTS, context_tokens=torch_probe.CONTEXT_TOKENS
    )
    found = torch_probe.probe(weights, engine)
    if not lora_rank:
        return found | {KV_EXPORT, INTERRUPTIBLE}
    invariant = is_invariant(model, lora_rank)
    return (found if invariant else found - {BATCH_INVARIANT, PREFILL_EXACT}) | {KV_EXPORT, LORA}

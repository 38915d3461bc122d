"""The built-in engine: continuous batching of Hugging Face causal models, float32, CPU.

A row's logits and keys depend on its tokens alone, bitwise (see `model`), so cached prefixes
(`prefix_cache_ratio`) equal a prefill. Nothing is cached where `probe` finds that prefill is not
exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dora_pipe.core.errors import ResourceError
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.engines.base import EngineBase
from dora_pipe.producers.engines.engine import (
    BATCH_INVARIANT,
    COUNTER_SAMPLING,
    KV_EXPORT,
    LORA,
    PARTIAL_ROLLOUT,
    PREFILL_EXACT,
    PREFIX_REUSE,
    ROUTES,
    SLEEP,
    UNASSIGNED_LEFT_OUT,
    EngineEvent,
    EngineRequest,
    Kv,
)
from dora_pipe.producers.engines.prefixes import KeptPrefixes, common_prefix
from dora_pipe.producers.engines.requests import Decode, stop_text
from dora_pipe.producers.engines.slots import Integers, SlotRequest, SlotRoutes, SlotTable
from dora_pipe.producers.engines.torch import probe as torch_probe
from dora_pipe.producers.engines.torch.attention import Piece, Run, StepAttention, split_pieces
from dora_pipe.producers.engines.torch.causal_lm import CausalLM, need_experts, read_causal_lm
from dora_pipe.producers.engines.torch.experts import ROWS_MIN
from dora_pipe.producers.engines.torch.kv import KvCache
from dora_pipe.producers.engines.torch.lora import AdapterVersions, is_invariant
from dora_pipe.producers.engines.torch.model import Weights, empty, fill, forward, fuse, rotations
from dora_pipe.producers.engines.torch.sampling import Sampler
from dora_pipe.producers.engines.torch.weights import (
    OpenWeights,
    open_directory,
    open_weights,
    random_tensors,
    tied_tensors,
    weight_files,
)
from dora_pipe.store.model_dir import unassigned_ids

PREFILL_TOKENS_MAX = 512
"""Prompt tokens per step."""

SHARED_MIN = 32
"""Minimum tokens that a prefix lookup, caching or waiting must save."""


class TorchEngine(EngineBase[SlotRequest]):
    """The built-in engine; see `open`.

    Example::

        engine = TorchEngine.open(Path("model"), slots=64, context_tokens=1024, threads=1)
        engine.add(EngineRequest(request="r", token_ids=[1, 5], sampled=0, seed=9, params=params))
        while engine.active:
            events = engine.step()
    """

    name = "torch"
    device = "cpu"
    dtype = "float32"
    _versions: AdapterVersions

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
        max_resident_versions: int = 1,
        prefix_cache_ratio: float = 0.0,
        routes: bool = False,
        unassigned: Sequence[int] = (),
    ) -> None:
        super().__init__(
            slots=slots,
            context_tokens=context_tokens,
            versions=AdapterVersions(
                model, slots=slots, rank=lora_rank, most=max_resident_versions, base=digest
            ),
            decode=decode,
            clock=clock,
        )
        kept_max = (
            int(prefix_cache_ratio * slots * context_tokens) if PREFILL_EXACT in declares else 0
        )
        self.declares = declares | ({PREFIX_REUSE} if kept_max else set())
        self.declares |= {ROUTES} if routes else set()
        self.declares |= set() if lora_rank else {SLEEP}
        self.version = str(torch.__version__)
        self._model = model
        self._weights = weights
        self._vocabulary = model.vocabulary
        # Rotated keys, halves of each head interleaved.
        self._layout = f"torch-1 {model.family} {model.layers}x{model.kv_heads}x{model.head_dim}"
        self._kv = KvCache(model, slots=slots, context_tokens=context_tokens)
        self._turns = rotations(model, context_tokens)[:, None]
        self._sampler = Sampler(slots=slots, unassigned=unassigned)
        self.declares |= {UNASSIGNED_LEFT_OUT} if unassigned else set()
        self._routes = _slot_routes(model, slots, context_tokens) if routes else None
        self._table = SlotTable(slots=slots, context_tokens=context_tokens)
        self._free = list(range(slots - 1, -1, -1))
        self._waiting: deque[int] = deque()
        """Slots in prefill, in order of arrival."""
        self._changed = False
        self._kept = KeptPrefixes(tokens_max=kept_max)
        self._kept_routes = KeptPrefixes(tokens_max=kept_max if routes else 0)
        """Experts of `_kept`; needs the same calls."""

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
        max_resident_versions: int = 1,
        prefix_cache_ratio: float = 0.0,
        routes: bool = False,
    ) -> TorchEngine:
        """Open a model directory; `load` weights if it has none.

        `lora_rank` and `max_resident_versions` bound the adapters on one base. Stop strings require
        `decode`. The prefix cache holds `prefix_cache_ratio` times all slots' tokens. `routes`
        enables routed experts. Sets torch's thread count. Raises PolicyError for an unsupported
        model, ConfigError, ResourceError.
        """
        torch.set_num_threads(threads)
        model = read_causal_lm(model_dir, context_tokens=context_tokens)
        if routes:
            need_experts(model, model_dir, context_tokens=context_tokens)
        files = weight_files(model_dir)
        weights, digest = _directory_weights(model, files, model_dir) if files else (None, "")
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
                max_resident_versions=max_resident_versions,
                prefix_cache_ratio=prefix_cache_ratio,
                routes=routes,
                unassigned=unassigned_ids(model_dir),
            )
        except MemoryError as error:
            raise ResourceError(
                f"no memory for the keys of {slots} slots of {context_tokens} tokens",
                hint="fewer slots, or a shorter context",
            ) from error

    def add(self, request: EngineRequest) -> None:
        self._check(request)
        stops, kv = stop_text(request, self._decode), request.kv
        slot = self._free.pop()
        row = SlotRequest(request=request, stops=stops, slot=slot, routing=self._routes)
        self._rows[request.request] = row
        self._versions.assign(slot, request)
        self._table.enter(row, cached=kv.tokens if kv else 0)
        if self._routes is not None:
            self._routes.enter(slot, request)
        if kv is not None:
            self._kv.adopt(slot, torch.from_numpy(kv.array))
            row.imported = True
        self._sampler.set(slot, request.params, request.seed)
        self._waiting.append(slot)

    def step(self) -> list[EngineEvent]:
        if not self._rows:
            return []
        pieces = self._arrange()
        order = self._kv.order
        positions = self._table.length[order] - 1
        with torch.inference_mode():
            logits = self._forward(order, positions, split_pieces(self._kv, pieces))
            if not len(order):
                return []
            drawn = self._sampler.draw(logits[: len(order)], order, positions + 1)
        self._keep_prompts(pieces)
        emitting = self._table.record(order, drawn, self._clock.wall_ns)
        if not emitting:
            return []
        events: list[EngineEvent] = []
        for row in [row for row in self._rows.values() if row.slot in emitting]:
            reason = emitting[row.slot]
            fault = f"the logits of token {row.length} are not finite" if reason == "error" else ""
            events += row.events(reason, fault)
            if reason is not None:
                if row.request.keep and reason != "error":
                    end = int(self._table.cached[row.slot])
                    self._keep(row, np.array(row.sequence[:end], np.int64))
                self._release(row)
        return events

    @property
    def kv_used_tokens(self) -> int:
        return int(self._table.cached.sum())

    def close(self) -> None:
        super().close()
        self._weights = None
        del self._kv

    def _has_weights(self) -> bool:
        return self._weights is not None

    def _read(self, weights: Path, version: int, digest: str) -> OpenWeights:
        model = self._model
        tied, further = tied_tensors(model), model.further
        return open_weights(weights, version, digest, model.tensors(), tied, further)

    def _replace(self, held: OpenWeights, version: int, digest: str) -> None:
        weights, self._weights = self._weights or empty(self._model), None
        fill(weights, held.items())  # a failure leaves an engine without weights
        self._weights = weights

    def _release_memory(self) -> None:
        self._weights = None
        del self._kv  # New caches are untouched memory.
        self._kv = KvCache(self._model, slots=self.slots, context_tokens=self.context_tokens)

    def _versions_changed(self) -> None:
        self._kept.retain(self._versions.digests)
        self._kept_routes.retain(self._versions.digests)

    def _interrupt(self, row: SlotRequest) -> None:
        self._take_out(row.slot)
        row.imported = row.waited = False
        self._table.prefill_again(row.slot)
        self._waiting.append(row.slot)

    def _release(self, row: SlotRequest) -> None:
        super()._release(row)
        self._take_out(row.slot)
        self._table.leave(row.slot)
        self._free.append(row.slot)

    def _take_out(self, slot: int) -> None:
        if slot in self._waiting:
            self._waiting.remove(slot)
        self._kv.release(slot)
        self._changed = True

    def _kv_array(self, tokens: int) -> tuple[str, tuple[int, ...]]:
        model = self._model  # keys first
        shape = (model.layers, 2, model.kv_heads, tokens, model.head_dim)
        return "<f4", shape

    def _kv_of(self, row: SlotRequest) -> Kv | None:
        slot, tokens = row.slot, int(self._table.length[row.slot]) - 1
        if not tokens or self._table.cached[slot] != tokens:
            return None
        array, digest = self._kv.copied(slot, tokens).numpy(), self._versions.digest_in(slot)
        return Kv(tokens=tokens, layout=self._layout, weights=digest, array=array)

    def _arrange(self) -> list[Piece]:
        table, kv = self._table, self._kv
        outgrown = kv.order[table.length[kv.order] > kv.room]
        entering = [(int(s), int(table.length[s]) - 1) for s in outgrown if kv.is_dense(int(s))]
        pieces, budget, put_off = list[Piece](), PREFILL_TOKENS_MAX, list[int]()
        while self._waiting and budget:
            slot = self._waiting[0]
            if not self._take_up(slot, pieces):
                put_off.append(self._waiting.popleft())
                continue
            start, end = int(table.cached[slot]), int(table.length[slot]) - 1
            if end - start <= budget:
                self._waiting.popleft()
                entering.append((slot, end))
            else:
                end = start + budget
            pieces.append(Piece(slot=slot, start=start, end=end))
            budget -= end - start
            self._computed += end - start
        if entering or self._changed:
            kv.settle(entering, table.cached)
            self._changed = False
        if pieces and self._waiting and pieces[-1].slot == self._waiting[0]:
            kv.stage(self._waiting[0], int(table.length[self._waiting[0]]) - 1)
            put_off.insert(0, self._waiting.popleft())  # keep their order
        self._waiting.extendleft(reversed(put_off))
        for piece in pieces:
            table.cached[piece.slot] = piece.end
        return pieces

    def _take_up(self, slot: int, before: Sequence[Piece]) -> bool:
        """Use cached prefixes for a slot. Return False to wait for a prompt in `before` with the
        same prefix."""
        ids = self._table.prompts[slot][:-1]
        if len(ids) < SHARED_MIN or self._table.cached[slot] or not self._kept.tokens_max:
            return True
        weights = self._versions.digest_in(slot)
        cached = self._kept.known(weights, ids)
        row = self._table.rows[slot]
        if not row.waited and self._gains(ids, weights, cached, before):
            row.waited = True
            return False
        data = self._kept.longest(weights, ids) if cached else None
        if data is not None:
            self._kv.adopt(slot, torch.from_numpy(data))
            if self._routes is not None:
                choices = self._kept_routes.longest(weights, ids)
                assert choices is not None
                self._routes.adopt(slot, choices)
            self._table.cached[slot] = cached
            self._reused += cached
        return True

    def _gains(self, ids: Integers, weights: str, cached: int, before: Sequence[Piece]) -> bool:
        enough = cached + SHARED_MIN
        return len(ids) >= enough and any(
            piece.end >= enough
            and not self._table.rows[piece.slot].imported
            and self._versions.digest_in(piece.slot) == weights
            and common_prefix(self._table.prompts[piece.slot], ids) >= enough
            for piece in before
        )

    def _keep_prompts(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            ids = self._table.prompts[piece.slot]
            if SHARED_MIN <= piece.end == len(ids) - 1 and self._kept.tokens_max:
                cached = self._kept.known(self._versions.digest_in(piece.slot), ids)
                if len(ids) - cached >= SHARED_MIN:
                    self._keep(self._table.rows[piece.slot], ids)

    def _keep(self, row: SlotRequest, ids: Integers) -> None:
        if row.imported:
            return
        slot, routes = row.slot, self._routes
        weights = self._versions.digest_in(slot)
        self._kept.keep(weights, ids, lambda start, end: self._kv.copied(slot, end, start).numpy())
        if routes is not None:
            self._kept_routes.keep(weights, ids, lambda *part: routes.copied(slot, *part))

    def _forward(self, order: Integers, positions: Integers, runs: Sequence[Run]) -> torch.Tensor:
        assert self._weights is not None
        table = self._table
        tokens = [table.last[order], *(table.prompts[r.slot][r.start : r.end] for r in runs)]
        places = [positions, *(np.arange(r.start, r.end) for r in runs)]
        slots = [order, *(np.full(r.end - r.start, r.slot) for r in runs)]
        padding = np.zeros(max(0, ROWS_MIN - sum(map(len, places))), np.int64)
        logits, chosen = forward(
            self._weights,
            torch.from_numpy(np.concatenate([*tokens, padding])),
            self._turns[torch.from_numpy(np.concatenate([*places, padding]))],
            StepAttention(self._kv, positions, runs),
            len(order),
            self._versions.rows_of(np.concatenate(slots)),
        )
        if self._routes is not None:
            rows, offsets = np.concatenate(slots), np.concatenate(places)
            self._routes.note(rows, offsets, torch.stack(chosen, 1)[: len(offsets)].numpy())
        return logits


def _slot_routes(model: CausalLM, slots: int, context_tokens: int) -> SlotRoutes:
    assert model.experts is not None
    return SlotRoutes(
        slots=slots,
        context_tokens=context_tokens,
        experts=model.experts.count,
        layers=len(model.experts.layers),
        per_token=model.experts.per_token,
    )


def _directory_weights(model: CausalLM, files: Sequence[Path], where: Path) -> tuple[Weights, str]:
    tied, further = tied_tensors(model), model.further
    opened, digest = open_directory(files, where, model.tensors(), tied, further)
    weights = empty(model)
    fill(weights, opened.items())
    return weights, digest


def _measured(model: CausalLM, weights: Weights | None, lora_rank: int) -> frozenset[str]:
    """Return the capabilities on this machine (see `probe`)."""
    if weights is None:
        reduced = model.only(model.kinds())
        weights = fuse(reduced, random_tensors(reduced, seed=0))
    part = torch_probe.small(weights)
    engine = TorchEngine(
        part.model, part, slots=torch_probe.SLOTS, context_tokens=torch_probe.CONTEXT_TOKENS
    )
    features = torch_probe.probe(weights, engine)
    if not lora_rank:
        return features | {KV_EXPORT, PARTIAL_ROLLOUT}
    invariant = is_invariant(model, lora_rank)
    return (features if invariant else features - {BATCH_INVARIANT, PREFILL_EXACT}) | {
        KV_EXPORT,
        LORA,
    }

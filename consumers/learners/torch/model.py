"""Hugging Face causal LM: log-probs of chosen tokens, weights in and out.

Computes logits only where they predict a counted token, unless a probe shows that logits are more
than the head on hidden states (soft caps, scales). Dropout is off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from dora_pipe.config.section import ComputeDtype
from dora_pipe.consumers.learners.layout import RowSize, lines_of, pack
from dora_pipe.consumers.learners.settings import StepSettings
from dora_pipe.consumers.learners.step import Part, Pass
from dora_pipe.consumers.learners.torch.chunked_layers import mlp_width
from dora_pipe.consumers.learners.torch.memory import (
    AT_ONCE,
    MemoryOptions,
    UnassignedRows,
    head_logprobs,
    token_logprobs,
)
from dora_pipe.consumers.learners.torch.narrow_weights import NarrowWeights
from dora_pipe.consumers.learners.torch.network import build, head_is_all
from dora_pipe.consumers.learners.torch.packed_attention import (
    Cuts,
    by_sequences,
    cuts_of,
    goes_by_sequences,
    need_apart,
)
from dora_pipe.consumers.learners.torch.routing import BalanceLoss, RoutedExperts
from dora_pipe.consumers.objectives.registry import needs_proximal, needs_reference, terms_of
from dora_pipe.consumers.objectives.terms import Inputs, RowMetrics, row_metrics
from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.context_tokens import TrainedRow
from dora_pipe.schemas.policy import PolicyDtype
from dora_pipe.schemas.routes import Choices
from dora_pipe.store.carried_tensors import CarriedTensors, carried_names, further_layers
from dora_pipe.store.network_names import parameters_in, stored
from dora_pipe.store.safetensors_file import Entry, TensorSource, mapped, read_entries

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
DTYPES_OF: Final[Mapping[PolicyDtype, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Right-padded rows of one pass, and their counted tokens.

    `places` are flat indices (row * width + position) of the hidden states predicting `targets`.
    """

    ids: Tensor  # [rows, width] int64
    places: Tensor  # [N] int64
    targets: Tensor  # [N] int64
    behaviour: Tensor  # [N] float32
    lengths: tuple[int, ...]
    """Counted tokens per row, adding up to N."""
    positions: Tensor | None = None  # [rows, width] int64
    """Positions within sequences, if rows are shared. Attention stays within a sequence, which
    starts where a position does not follow the previous.
    """
    cuts: Cuts | None = None
    routes: Tensor | None = None  # [rows * width, layers, per_token] int64
    """Recorded experts, -1 where the router chooses."""
    spans: tuple[tuple[int, int], ...] = ()
    """Flat indices [start, end) of each row."""


class TorchModel:
    """Network of a model directory; its policy is softmax(logits / `temperature`) over assigned
    ids."""

    def __init__(
        self,
        assets: Path,
        *,
        device: str,
        temperature: float = 1.0,
        memory: MemoryOptions = AT_ONCE,
        bfloat16: Collection[str] = (),
        dtype: ComputeDtype = "float32",
        narrow: NarrowWeights | None = None,
    ) -> None:
        """`bfloat16` names tensors stored in that type; `dtype` is the compute type; `narrow` holds
        frozen matrices in bfloat16."""
        self.device = device
        self._dtype = dtype
        self._bfloat16 = frozenset(bfloat16)
        self._temperature = temperature
        self.network: Any = build(assets, memory, narrow).to(device)
        self.vocabulary: int = self.network.config.vocab_size
        self.unassigned: UnassignedRows = self.network.unassigned
        self.mlp_width = mlp_width(self.network)
        self._memory = memory
        self._routed: RoutedExperts | None = None
        self._balance: BalanceLoss | None = None
        self._carried = CarriedTensors()
        self.lean = False
        self.updated = False
        """Whether the optimizer ever changed the parameters; only adapters need it."""
        self.varlen = memory.packing and goes_by_sequences(self.network, dtype, device)

    def load(self, weights: Path) -> None:
        """Load a safetensors file. Raises PolicyError on a mismatch."""
        if self._routed is not None:  # probes must not use the last pass's routes
            self._routed.take(None)
        self._carried = load_weights(self.network, weights)
        self.lean = head_is_all(self.network, self.device)
        if self._memory.packing:
            need_apart(self.network, self.device)

    def logprobs(self, passage: Passage) -> Tensor:
        """Return log-probs of the counted tokens at the model's temperature, [N] float32.

        Needs no padding mask: right padding, causal attention.
        """
        if passage.routes is not None or self._routed is not None:
            self.routed.take(passage.routes)
        with computing(self._dtype, self.device):
            return score(
                self.network,
                passage.ids,
                passage.places,
                passage.targets,
                lean=self.lean,
                temperature=self._temperature,
                chunks=self._memory.head_chunks(len(passage.targets), self.vocabulary),
                positions=passage.positions,
                cuts=passage.cuts if self.varlen else None,
            )

    def logprobs_and_balance(
        self, passage: Passage, weights: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs, and the weighted load-balancing losses. Raises PolicyError."""
        if passage.routes is not None:
            _ = self.routed  # created here: its probe must not be recorded
        return self.balance.beside(lambda: self.logprobs(passage), passage.spans, weights)

    @property
    def balance(self) -> BalanceLoss:
        """Return the router loss. Raises PolicyError for a model without one."""
        if self._balance is None:
            self._balance = BalanceLoss(self.network)
        return self._balance

    @property
    def routed(self) -> RoutedExperts:
        """Return the expert routing. Raises PolicyError for an unsupported model."""
        if self._routed is None:
            self._routed = RoutedExperts(self.network)
        return self._routed

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters by the network's own names, tied ones once."""
        yield from self.network.named_parameters()

    @property
    def bfloat16(self) -> frozenset[str]:
        """Return the names of parameters stored in bfloat16."""
        return parameters_in(self.network, self._bfloat16)

    def sources(self) -> list[TensorSource]:
        """Return the tensors to store, tied ones once, with extra tensors of the file."""
        own = [
            tensor_source(name, tensor, torch.bfloat16 if name in self._bfloat16 else tensor.dtype)
            for name, tensor in stored(self.network).items()
        ]
        return own + self._carried.sources()


def computing(dtype: ComputeDtype, device: str) -> AbstractContextManager[Any]:
    """Return an autocast context: products in this type; norms, softmax and residuals in
    float32."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


def load_weights(network: Any, weights: Path) -> CarriedTensors:
    """Copy a safetensors file into a network; return its extra layers. Raises PolicyError."""
    expected = stored(network)
    entries = {entry.name: entry for entry in read_entries(weights)}
    further = further_layers(network.config.get_text_config().to_dict())
    carried = [entries.pop(name) for name in sorted(carried_names(entries, further))]
    need_fit(weights, entries, {name: tuple(tensor.shape) for name, tensor in expected.items()})
    with mapped(weights) as data, torch.no_grad():
        for name, tensor in expected.items():
            # Convert on the device: smaller transfer, same rounding.
            tensor.copy_(read_tensor(data, entries[name]).to(tensor.device))
    return CarriedTensors(weights, carried)


def need_fit(
    weights: Path, entries: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise PolicyError unless a file has these tensors."""
    odd = sorted(entries.keys() ^ shapes.keys())
    if odd:
        raise PolicyError(f"{weights} does not fit the model: {odd[0]!r} is on one side only")
    for name, entry in entries.items():
        if entry.shape != shapes[name] or entry.dtype not in DTYPES:
            raise PolicyError(f"{weights} does not fit the model: {name!r} is {entry.shape}")


def read_tensor(data: memoryview, entry: Entry) -> Tensor:
    """Copy one tensor of a mapped safetensors file."""
    with data[entry.start : entry.end] as part:
        copied = np.array(part, dtype=np.uint8)
    return torch.from_numpy(copied).view(DTYPES[entry.dtype]).reshape(entry.shape)


def tensor_source(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorSource:
    """Return a tensor to write, converted to `dtype` if given."""
    kind = dtype or tensor.dtype

    def data() -> memoryview:
        # Convert on the device: else torch copies all bits and rounds on the CPU.
        plain = tensor.detach().to(kind).to("cpu").contiguous().reshape(-1)
        bytes_: Any = plain.view(torch.uint8).numpy()
        return memoryview(bytes_)

    return TensorSource(name=name, dtype=NAMES[kind], shape=tuple(tensor.shape), data=data)


def bfloat16_names(weights: Path) -> frozenset[str]:
    """Return the names of a file's bfloat16 tensors. Raises PolicyError."""
    return frozenset(
        entry.name for entry in read_entries(weights) if entry.dtype == NAMES[torch.bfloat16]
    )


def published_dtype(weights: Path) -> PolicyDtype:
    """Return the common dtype of a file's weights. Raises PolicyError if mixed."""
    kinds = {
        entry.dtype for entry in read_entries(weights) if DTYPES[entry.dtype].is_floating_point
    }
    narrow = NAMES[torch.bfloat16]
    if narrow in kinds and len(kinds) > 1:
        raise PolicyError(f"{weights} mixes bfloat16 with {min(kinds - {narrow})}")
    return "bfloat16" if narrow in kinds else "float32"


def passage_of(
    rows: Sequence[TrainedRow],
    *,
    width: int,
    device: str,
    lines: Sequence[Sequence[int]] | None = None,
    choices: Sequence[Choices | None] = (),
    masked: bool = False,
) -> Passage:
    """Return rows (token ids, loss mask, log-probs) as one pass, padded to `width`.

    `lines` lists the rows of each line, by index; `choices` are recorded experts by row; `masked`
    forces a mask. The first token of a row never counts.
    """
    lines = lines or [[row] for row in range(len(rows))]
    starts = _starts([len(token_ids) for token_ids, _, _ in rows], lines, width)
    ids = np.zeros(len(lines) * width, dtype=np.int64)
    places, targets, behaviour, lengths = [], [], [], []
    for start, (token_ids, mask, logprobs) in zip(starts, rows, strict=True):
        tokens = np.asarray(token_ids, dtype=np.int64)
        ids[start : start + len(tokens)] = tokens
        counted = counted_positions(mask)
        places.append(start + counted - 1)
        targets.append(tokens[counted])
        behaviour.append(np.asarray(logprobs, dtype=np.float32)[counted])
        lengths.append(len(counted))
    shared = any(len(line) > 1 for line in lines)
    positions = _positions(starts, len(lines), width) if shared else None
    return Passage(
        ids=torch.from_numpy(ids.reshape(len(lines), width)).to(device),
        places=torch.from_numpy(np.concatenate(places)).to(device),
        targets=torch.from_numpy(np.concatenate(targets)).to(device),
        behaviour=torch.from_numpy(np.concatenate(behaviour)).to(device),
        lengths=tuple(lengths),
        positions=None if positions is None else positions.to(device),
        cuts=None if positions is None or masked else cuts_of(positions, device),
        routes=_routes(starts, choices, len(lines) * width, device),
        spans=tuple((start, start + len(row[0])) for start, row in zip(starts, rows, strict=True)),
    )


def _routes(
    starts: Sequence[int], choices: Sequence[Choices | None], tokens: int, device: str
) -> Tensor | None:
    """Experts of a place are those recorded for the next token."""
    present = [choice for choice in choices if choice is not None]
    if not present:
        return None
    flat = np.full((tokens, *present[0].shape[1:]), -1, dtype=np.int64)
    for start, choice in zip(starts, choices, strict=True):
        if choice is not None:
            given = choice[1:].astype(np.int64)
            given[choice[1:] == np.iinfo(choice.dtype).max] = -1
            flat[start : start + len(given)] = given
    return torch.from_numpy(flat).to(device)


def _starts(lengths: Sequence[int], lines: Sequence[Sequence[int]], width: int) -> list[int]:
    starts = [0] * len(lengths)
    for number, line in enumerate(lines):
        position = number * width
        for row in line:
            starts[row] = position
            position += lengths[row]
    return starts


def _positions(starts: Sequence[int], lines: int, width: int) -> Tensor:
    """Padding continues the positions of the row before it."""
    first = np.zeros(lines * width, dtype=np.int64)
    first[list(starts)] = starts
    flat = np.arange(lines * width) - np.maximum.accumulate(first)
    return torch.from_numpy(flat.reshape(lines, width))


def counted_positions(mask: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the positions of counted tokens, without the first."""
    return np.flatnonzero(np.asarray(mask)[1:]) + 1


def score(
    network: Any,
    ids: Tensor,
    places: Tensor,
    targets: Tensor,
    *,
    lean: bool,
    temperature: float,
    chunks: int = 1,
    positions: Tensor | None = None,
    cuts: Cuts | None = None,
) -> Tensor:
    """Return log-probs of `targets` at `places` (see `Passage`), [N] float32.

    `lean` (`head_is_all`) computes logits only at `places`, in chunks.
    """
    given = {} if positions is None else {"position_ids": positions}
    if cuts is not None:
        given |= by_sequences(cuts)
    if lean:
        hidden = network.base_model(input_ids=ids, use_cache=False, **given)[0]
        chosen = hidden.flatten(0, 1).index_select(0, places)
        head = network.get_output_embeddings()
        how: Any = {"temperature": temperature, "chunks": chunks, "unassigned": network.unassigned}
        return head_logprobs(head, chosen, targets, **how)
    logits = network(input_ids=ids, use_cache=False, **given).logits
    chosen = logits.flatten(0, 1).index_select(0, places)
    return token_logprobs(network.unassigned.leave_out(chosen), targets, temperature)


def passages_of(pass_: Pass, device: str) -> list[Passage]:
    rows = [row for unit in pass_.units for row in unit.sequences()]
    choices = [choice for unit in pass_.units for choice in unit.choices()]
    return cut_passages(rows, pass_.parts, device, choices)


def cut_passages(
    rows: Sequence[TrainedRow],
    parts: Sequence[Part],
    device: str,
    choices: Sequence[Choices | None] = (),
) -> list[Passage]:
    """Return rows and their experts as passages."""
    passages, position = [], 0
    for part in parts:
        own = rows[position : position + part.rows]
        shared = lines_of([len(ids) for ids, _, _ in own], part.width) if part.lines else None
        passages.append(
            passage_of(
                own,
                width=part.width,
                device=device,
                lines=shared,
                choices=choices[position : position + part.rows],
                masked=part.masked,
            )
        )
        position += part.rows
    return passages


def per_token(values: Sequence[float], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Repeat a value per unit for its counted tokens, [N] float32."""
    spread = torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(lengths))
    return spread.to(device)


@dataclass(slots=True, kw_only=True)
class PassInputs:
    """Inputs of a pass, by unit except `passages` and `proximal`."""

    passages: Sequence[Passage]
    rows: Sequence[int]
    lengths: Sequence[int]
    advantages: Sequence[float]
    weights: Sequence[float]
    teacher: Sequence[Sequence[float] | None]
    proximal: Tensor | None = None
    """[N]; None in a step's first update, which uses its own."""

    def row_weights(self) -> list[list[float]]:
        """Return, by passage, the summed token weight of each row."""
        units = zip(self.weights, self.rows, strict=True)
        rows = iter([weight for weight, count in units for _ in range(count)])
        return [[next(rows) * counted for counted in passage.lengths] for passage in self.passages]


def inputs_of(pass_: Pass, device: str) -> PassInputs:
    return PassInputs(
        passages=passages_of(pass_, device),
        rows=[len(unit.rows) for unit in pass_.units],
        lengths=[unit.counted for unit in pass_.units],
        advantages=[unit.advantage for unit in pass_.units],
        weights=[unit.weight for unit in pass_.units],
        teacher=[unit.teacher for unit in pass_.units],
        proximal=pass_.proximal,
    )


def pass_loss(
    given: PassInputs,
    logprobs: Tensor,
    *,
    reference: Callable[[Passage], Tensor],
    step: StepSettings,
) -> tuple[Tensor, list[RowMetrics]]:
    """Return the weighted loss of a pass, and metrics by unit; `logprobs` is [N]."""
    objective, device = step.objective, logprobs.device
    proximal = given.proximal
    if not needs_proximal(objective):
        proximal = None
    elif proximal is None:
        proximal = logprobs.detach()
    weights = per_token(given.weights, given.lengths, device)
    inputs = Inputs(
        logprobs=logprobs,
        behaviour=joined([passage.behaviour for passage in given.passages]),
        proximal=proximal,
        reference=(
            joined([reference(passage) for passage in given.passages])
            if needs_reference(objective)
            else None
        ),
        teacher=_teacher(given.teacher, logprobs) if objective.teacher_weight else None,
        advantages=per_token(given.advantages, given.lengths, device),
        lengths=given.lengths,
    )
    terms = terms_of(inputs, objective)
    return (terms.loss * weights).sum(), row_metrics(terms, weights, given.lengths)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors; return a single one unchanged."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _teacher(rows: Sequence[Sequence[float] | None], logprobs: Tensor) -> Tensor:
    scores = [score for row in rows for score in row or ()]
    assert len(scores) == len(logprobs), "a row without log-probs of the teacher"
    return torch.tensor(scores, dtype=torch.float32, device=logprobs.device)


def leaf_of(parts: Sequence[Tensor]) -> Tensor:
    """Return log-probs of a pass's parts as one leaf.

    The rows of a trajectory may exceed one graph: the loss is taken of log-probs without a graph;
    `pulled` returns its gradient by part, which is recomputed with a graph.
    """
    return joined(parts).detach().requires_grad_()


def pulled(leaf: Tensor, loss: Tensor, parts: Sequence[Passage]) -> list[Tensor]:
    """Return the loss gradient by the log-probs of each part."""
    torch.autograd.backward(loss)
    assert leaf.grad is not None
    return list(torch.split(leaf.grad, [sum(part.lengths) for part in parts]))


def score_rows(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    logprobs: Callable[[Passage], Tensor],
    *,
    padded_tokens_max: int,
    device: str,
    choices: Sequence[Choices | None] = (),
) -> list[list[float]]:
    """Return log-probs of rows (token ids, mask) where the mask is 1, never of the first token."""
    by_row: list[list[float]] = [[] for _ in rows]
    chosen = [index for index, (_, mask) in enumerate(rows) if any(mask[1:])]
    sized = [RowSize(ordinal=index, sample=0, tokens=len(rows[index][0])) for index in chosen]
    with torch.no_grad():
        for micro in pack(sized, padded_tokens_max=padded_tokens_max):
            places = [chosen[row] for row in micro.rows]
            parts = [(*rows[index], [0.0] * len(rows[index][0])) for index in places]
            through = [choices[index] for index in places] if choices else ()
            passage = passage_of(parts, width=micro.width, device=device, choices=through)
            scored = torch.split(logprobs(passage), list(passage.lengths))
            for index, part in zip(places, scored, strict=True):
                by_row[index] = part.tolist()
    return by_row


def temperature_numerics(temperature: float) -> dict[str, str]:
    """Return the temperature's fingerprint entry; empty at 1."""
    return {} if temperature == 1 else {"temperature": repr(temperature)}

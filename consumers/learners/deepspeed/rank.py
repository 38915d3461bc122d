"""Commands executed on every rank, including rank 0; arithmetic as in the torch learner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import PlaceReader, RecordPlace, record_digest
from dora_pipe.consumers.learners.deepspeed.commands import (
    Finish,
    Gather,
    Keep,
    Load,
    Open,
    PassCommand,
    Ready,
    ShareCommand,
    StepReply,
    Train,
    UpdateReply,
)
from dora_pipe.consumers.learners.deepspeed.engine import Engine, EngineOptions
from dora_pipe.consumers.learners.deepspeed.rank_group import RankGroup
from dora_pipe.consumers.learners.learner import LoggedAt
from dora_pipe.consumers.learners.settings import StepSettings, step_settings
from dora_pipe.consumers.learners.torch.device import deterministic
from dora_pipe.consumers.learners.torch.device_states import DeviceStates, tensors_in
from dora_pipe.consumers.learners.torch.lora import read_matrices
from dora_pipe.consumers.learners.torch.model import (
    Passage,
    PassInputs,
    TorchModel,
    cut_passages,
    joined,
    leaf_of,
    pass_loss,
    passage_of,
    pulled,
)
from dora_pipe.consumers.objectives.registry import needs_proximal, needs_reference, objective_kind
from dora_pipe.core.errors import BusError, InvariantBroken, SchemaError
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.pure.records import Record
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.schemas.context_tokens import choices_of, row_of
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import view_trajectory
from dora_pipe.store.adapters import base_of
from dora_pipe.store.store import PolicyStore

GAP: Final = 2
"""Read together: Kafka puts transaction markers between records."""


class ShareReader:
    def __init__(self, bus: Bus, topic: str, clock: Clock) -> None:
        self._topic = topic
        self._reader = PlaceReader(
            bus, topic, gap=GAP, attempt=lambda call: retry_bus("reading", call, clock)
        )
        self.records = 0

    def read(self, places: Sequence[LoggedAt]) -> list[Trajectory]:
        """Return the trajectories at these places. Raises InvariantBroken for other bytes,
        BusError."""
        records: dict[tuple[int, int], Record] = {}
        positions = dict.fromkeys(RecordPlace(logged.partition, logged.offset) for logged in places)
        for record in self._reader.read(positions):
            records[record.partition, record.offset] = record
            self.records += 1
        decoded: dict[LoggedAt, Trajectory] = {}
        for logged in places:
            if logged not in decoded:
                decoded[logged] = self._decoded(logged, records)
        return [decoded[logged] for logged in places]

    def close(self) -> None:
        self._reader.close()

    def _decoded(self, logged: LoggedAt, records: dict[tuple[int, int], Record]) -> Trajectory:
        record = records.get((logged.partition, logged.offset))
        where = f"{self._topic}/{logged.partition} offset {logged.offset}"
        if record is None:
            raise InvariantBroken(f"{where} is empty, where a trajectory of the batch was")
        if record_digest(record) != logged.sha256:
            raise InvariantBroken(f"{where} has other bytes than the batch was taken with")
        try:
            return view_trajectory(record.value)
        except SchemaError as error:
            raise InvariantBroken(f"{where} cannot be read: {error.message}") from error


IDLE: Final = ([0, 0], [0, 1], [None, 0.0])
"""Row of an idle rank: two tokens, one counted."""


@dataclass(slots=True, kw_only=True)
class _Round:
    """Passes between two synchronizations: this rank's, or none."""

    turns: int
    given: PassInputs | None
    padded_tokens: int = 0

    def passages(self, idle: Passage) -> list[Passage]:
        own = [] if self.given is None else list(self.given.passages)
        return own + [idle] * (self.turns - len(own))

    def row_weights(self) -> list[list[float]]:
        own = [] if self.given is None else self.given.row_weights()
        return own + [[0.0]] * (self.turns - len(own))


class Rank:
    """A learner's part in this process. Opens the log on first use.

    Construction, `read`, `compute` and `finish` are collective.
    """

    def __init__(self, group: RankGroup, command: Open, store: PolicyStore | None = None) -> None:
        self._group = group
        self._threads = command.threads
        self._modules = command.modules
        self._assets = _assets(command.assets, store)
        self._store = store
        self._reference_path = ""
        self._place = command.log
        self._bus: Bus | None = None
        self._reader: ShareReader | None = None
        self._reference: TorchModel | None = None
        self._adapter: dict[str, Tensor] = {}
        self._device = group.device
        options = msgspec.convert({**command.options, "device": group.device}, EngineOptions)
        with deterministic(self._threads), group.together():
            self.engine = Engine(self._assets, options)
        self._idle = passage_of([IDLE], width=len(IDLE[0]), device=self._device)
        self._gathered = False
        self._kept: list[Tensor] = []
        self._states = DeviceStates(self._resident, self._device)

    def leave_device(self) -> None:
        """Move to host memory until needed. Raises ResourceError."""
        self._states.leave()

    def _resident(self) -> Iterator[Tensor]:
        yield from self.engine.resident()
        yield from tensors_in([self._adapter, self._kept])
        if self._reference is not None:
            network = self._reference.network
            yield from tensors_in([*network.parameters(), *network.buffers()])

    def close(self) -> None:
        self.engine.close()
        if self._reader is not None:
            self._reader.close()
        if self._bus is not None:
            self._bus.close()

    # Weights

    def load_base(self, given: Callable[[str], Tensor] | None = None) -> None:
        """Load the adapter's base; `given` as in `load`."""
        self._states.come_back()
        engine = self.engine
        for name in engine.base_names:
            engine.write(name, self._shared(name, name, engine.dtype(name), given))

    def load(self, command: Load, given: Callable[[str], Tensor] | None = None) -> None:
        """Load trained tensors, and moments; `given` returns rank 0's tensors by file name."""
        self._states.come_back()
        engine = self.engine
        self._drop_gathered()
        self._kept = []
        with torch.no_grad():
            for name in engine.names:
                engine.write(name, self._shared(name, name, engine.dtype(name), given))
            engine.reset_moments(command.updates)
            if command.moments:
                for moment, name in engine.moments:
                    kind = engine.dtype(name, moment)
                    value = self._shared(f"{moment}/{name}", name, kind, given)
                    engine.write(name, value, moment)
            engine.fit()

    def _shared(
        self, key: str, name: str, dtype: torch.dtype, given: Callable[[str], Tensor] | None
    ) -> Tensor:
        if given is not None:
            value = given(key).to(dtype).contiguous()
        else:
            value = torch.empty(self.engine.shape(name), dtype=dtype)
        return self._group.share(value).to(self._device)

    def read(self, *, moments: bool) -> Iterator[Tensor]:
        """Yield every trained tensor or moment; complete on rank 0 only; collective."""
        self._states.come_back()
        with self._group.together():
            if moments:
                for moment, name in self.engine.moments:
                    yield self.engine.read(name, moment)
            else:
                yield from self.engine.read_files()

    # Training step

    def fetch(self, command: ShareCommand) -> tuple[Ready, list[Trajectory]]:
        """Read this rank's trajectories from the log, in pass order."""
        passes = [pass_ for by_rank in command.updates for pass_ in by_rank[self._group.info.rank]]
        places = [unit.at for pass_ in passes for unit in pass_.units]
        if self._place is None:
            return Ready(why="this rank has no log address"), []
        try:
            if self._reader is None:
                self._bus = self._place.open()
                topic = Topics(self._place.run).trajectories
                self._reader = ShareReader(self._bus, topic, SystemClock())
            before = self._reader.records
            trajectories = self._reader.read(places)
        except BusError as error:
            return Ready(why=error.message), []
        except InvariantBroken as error:
            return Ready(why=error.message, broken=True), []
        return Ready(records=self._reader.records - before), trajectories

    def compute(self, command: ShareCommand, trajectories: Sequence[Trajectory]) -> StepReply:
        """Train or gather; `trajectories` are in pass order."""
        self._states.come_back()
        if isinstance(command, Gather):
            return self._gather(command, trajectories)
        assert isinstance(command, Train)
        return self._train(command, trajectories)

    def _train(self, command: Train, trajectories: Sequence[Trajectory]) -> StepReply:
        step, following = step_settings(command.settings), iter(trajectories)
        with deterministic(self._threads), self._group.together():
            self._drop_gathered()
            self._prepare(command, step)
            updates = [self._rounds(by_rank, following) for by_rank in command.updates]
            if needs_proximal(step.objective) and command.later:
                with self._at_kept():
                    self._score_proximal(updates)
            elif needs_proximal(step.objective):
                self._score_proximal(updates[1:])  # the first update computes its own
            done: list[UpdateReply] = []
            for rounds in updates:
                if not rounds:
                    continue
                update = self._accumulate(rounds, step, ends=True)
                update.norm = self.engine.update(step.learning_rate, step.max_grad_norm)
                done.append(update)
                if not math.isfinite(update.norm):
                    break
        return StepReply(updates=done)

    def _gather(self, command: Gather, trajectories: Sequence[Trajectory]) -> StepReply:
        step = step_settings(command.settings)
        (by_rank,), following = command.updates, iter(trajectories)
        with deterministic(self._threads), self._group.together():
            if command.fresh:
                self._drop_gathered()
            self._prepare(command, step)
            self._gathered = True
            update = self._accumulate(self._rounds(by_rank, following), step, ends=False)
        return StepReply(updates=[update])

    def finish(self, command: Finish) -> float:
        """Divide the gathered gradient and update; return the norm, possibly not finite."""
        self._states.come_back()
        with deterministic(self._threads), self._group.together():
            return self._end_gathered(command.learning_rate, command.max_grad_norm, command.divisor)

    def _end_gathered(self, learning_rate: float, norm_max: float, divisor: float) -> float:
        """An empty last pass: ranks reduce only in a last pass, unknown until now."""
        self._gathered = False
        self.engine.backward(self.engine.logprobs(self._idle).sum() * 0.0, last=True)
        return self.engine.update(learning_rate, norm_max, divisor)

    def _drop_gathered(self) -> None:
        """DeepSpeed can drop a gradient only by an update: update and restore."""
        if not self._gathered:
            return
        with deterministic(self._threads), self._group.together():
            before = [tensor.clone() for tensor in self.engine.held()]
            self._end_gathered(0.0, 1.0, 1.0)
            _put(before, self.engine.held())

    def keep(self, command: Keep) -> None:
        """Copy the trained state, restore it, or free the copy."""
        self._states.come_back()
        self._drop_gathered()
        if command.what == "take":
            self._kept = [tensor.clone() for tensor in self.engine.held()]
            return
        if command.what == "go-back":
            _put(self._kept, self.engine.held())
        self._kept = []

    @contextmanager
    def _at_kept(self) -> Iterator[None]:
        weights = self.engine.weights()
        present = [tensor.clone() for tensor in weights]
        _put(self._kept[: len(weights)], weights)
        self.engine.written()
        yield
        _put(present, weights)
        self.engine.written()

    def _prepare(self, command: ShareCommand, step: StepSettings) -> None:
        objective_kind(step.objective.kind, self._modules)
        if needs_reference(step.objective) and command.reference != self._reference_path:
            self._refer_to(command.reference)

    def _rounds(
        self, by_rank: list[list[PassCommand]], following: Iterator[Trajectory]
    ) -> list[_Round]:
        turns = [max(len(pass_.parts) for pass_ in met if pass_) for met in zip_longest(*by_rank)]
        own = [self._given(pass_, following) for pass_ in by_rank[self._group.info.rank]]
        rounds = [_Round(turns=count, given=None) for count in turns]
        for round_, (given, padded_tokens) in zip(rounds, own, strict=False):
            round_.given, round_.padded_tokens = given, padded_tokens
        return rounds

    def _given(
        self, command: PassCommand, following: Iterator[Trajectory]
    ) -> tuple[PassInputs, int]:
        rows, choices = [], []
        for unit in command.units:
            trajectory = next(following)
            rows += [row_of(trajectory, context) for context in unit.contexts]
            choices += [choices_of(trajectory, context) for context in unit.contexts]
        given = PassInputs(
            passages=cut_passages(rows, command.parts, self._device, choices),
            rows=[len(unit.contexts) for unit in command.units],
            lengths=[unit.length for unit in command.units],
            advantages=[unit.advantage for unit in command.units],
            weights=[unit.weight for unit in command.units],
            teacher=[unit.teacher for unit in command.units],
        )
        return given, sum(part.padded_tokens for part in command.parts)

    def _score_proximal(self, updates: Sequence[Sequence[_Round]]) -> None:
        for rounds in updates:
            for round_ in rounds:
                scored = self._scored(round_.passages(self._idle))
                if round_.given is not None:
                    round_.given.proximal = joined(scored[: len(round_.given.passages)])

    def _scored(self, passages: Sequence[Passage]) -> list[Tensor]:
        with torch.no_grad():
            return [self.engine.logprobs(passage) for passage in passages]

    def _accumulate(
        self, rounds: Sequence[_Round], step: StepSettings, *, ends: bool
    ) -> UpdateReply:
        """`ends`: an update follows."""
        update = UpdateReply()
        for number, round_ in enumerate(rounds):
            losses = self._losses(round_, step, update)
            for turn, loss in enumerate(losses, start=1):
                last = number == len(rounds) - 1 and turn == round_.turns
                self.engine.backward(loss, last=last and ends)
        return update

    def _losses(self, round_: _Round, step: StepSettings, update: UpdateReply) -> Iterator[Tensor]:
        passages, weights = round_.passages(self._idle), round_.row_weights()
        base = [self._base_logprobs(passage, step) for passage in passages]
        if round_.turns == 1:
            logprobs, extra = self._with_balance(passages[0], weights[0], step, update)
            loss = self._loss(round_, logprobs, base, step, update)
            yield (logprobs.sum() * 0.0 if loss is None else loss) + extra
            return
        scored = self._scored(passages)
        gradients: list[Tensor] = []
        if round_.given is not None:
            own = round_.given.passages
            leaf = leaf_of(scored[: len(own)])
            loss = self._loss(round_, leaf, base, step, update)
            assert loss is not None
            gradients = pulled(leaf, loss, own)
        for turn, passage in enumerate(passages):
            logprobs, extra = self._with_balance(passage, weights[turn], step, update)
            yield (logprobs * (gradients[turn] if turn < len(gradients) else 0.0)).sum() + extra

    def _with_balance(
        self, passage: Passage, weights: Sequence[float], step: StepSettings, update: UpdateReply
    ) -> tuple[Tensor, Tensor | float]:
        """Idle ranks take the same path with weight 0, so gradients become ready in the same
        order."""
        if not step.router_aux_loss:
            return self.engine.logprobs(passage), 0.0
        logprobs, balance = self.engine.logprobs_and_balance(passage, weights)
        update.router_aux += float(balance.detach())
        return logprobs, step.router_aux_loss * balance

    def _loss(
        self,
        round_: _Round,
        logprobs: Tensor,
        base: Sequence[Tensor | None],
        step: StepSettings,
        update: UpdateReply,
    ) -> Tensor | None:
        if round_.given is None:
            return None
        following = iter(base)

        def reference(passage: Passage) -> Tensor:
            reference = next(following)
            return self._reference_logprobs(passage) if reference is None else reference

        loss, metrics = pass_loss(round_.given, logprobs, reference=reference, step=step)
        update.loss += float(loss.detach())
        update.padded_tokens += round_.padded_tokens
        update.rows.append(metrics)
        return loss

    def _base_logprobs(self, passage: Passage, step: StepSettings) -> Tensor | None:
        """Collective: idle ranks call it too."""
        if self.engine.pairs is None or not needs_reference(step.objective):
            return None
        return self.engine.logprobs_instead(passage, self._adapter)

    def _refer_to(self, path: str) -> None:
        weights, pairs = _reference(path, self._store), self.engine.pairs
        options = self.engine.options
        if pairs is not None:
            assert options.lora is not None
            tensors = (
                {}
                if base_of(weights) is None
                else read_matrices(weights, pairs.layers, options.lora, options.published)
            )
            self._adapter = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        else:
            self._reference = self._reference or TorchModel(
                self._assets,
                device=self._device,
                temperature=options.temperature,
                memory=options.memory,
            )
            self._reference.load(weights)
        self._reference_path = path

    def _reference_logprobs(self, passage: Passage) -> Tensor:
        assert self._reference is not None
        with torch.no_grad():
            return self._reference.logprobs(passage)


def _put(values: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for index, value in zip(places, values, strict=True):
            index.copy_(value)


def _assets(path: str, store: PolicyStore | None) -> Path:
    there = Path(path)
    return there if store is None or there.is_dir() else store.assets(there.name)


def _reference(path: str, store: PolicyStore | None) -> Path:
    there = Path(path)
    return there if store is None or there.is_file() else store.held_weights(there.stem)


def engine_options(options: EngineOptions) -> dict[str, Any]:
    """Return `Open.options` of these options."""
    plain: dict[str, Any] = msgspec.to_builtins(options)
    del plain["device"]
    return plain

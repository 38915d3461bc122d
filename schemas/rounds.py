"""Rounds: what the orchestrator had read, what it observed, what it decided; one JSON object each.

State is a fold of rounds: apply the control records with offset < `control_next`, then the
observations, then the decisions. Decisions are self-contained, so that workers and trainer need no
fold.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from dora_pipe.core.errors import InvariantBroken, SchemaError
from dora_pipe.schemas.control import Resume, TakenGroup, TakenTrajectory
from dora_pipe.schemas.identity import Purpose, source_of, trajectory_id
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.wire import decode, encode, kebab, sha256_hex

Fate = Literal["trained", "filtered", "failed", "cancelled", "evaluated"]
"""How a group ends; until then it is open. `trained` comes from the commit, not from a decision."""

GENESIS_CHAIN = "0" * 64
"""The chain before the first round."""

SiblingFate = Literal["surplus", "expired"]
"""How a sibling ends that its group does not wait for: enough others were valid before it; or the
group was open for too long. Neither is a failure."""

NO_VERSION: Final = -1
"""What a worker hosts that has let go of its weights, or has just joined. Assigned it, a worker
sleeps until it is assigned a version again."""

STATE_DIGEST_EVERY = 64
"""Every so many rounds (and at the last one) a round carries the digest of the state."""


class Observation(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kebab):
    """Base of what enters state from outside control: metrics and time."""


class LeaseExpired(Observation, frozen=True, kw_only=True):
    """Nothing was heard of this incarnation for the length of its lease."""

    worker: str
    epoch: int


class Progressed(Observation, frozen=True, kw_only=True):
    """How far a request had come when it lost its worker."""

    trajectory: str
    resume: Resume


class KvPressure(Observation, frozen=True, kw_only=True):
    """A worker's KV cache is fuller than the threshold."""

    worker: str
    epoch: int
    used_tokens: int


class OffEngine(Observation, frozen=True, kw_only=True):
    """Some of a worker's requests need no slot now: a prompt, an environment, a reward, the codec
    or the log is waited for."""

    worker: str
    epoch: int
    requests: int
    """How many; the others may need one."""


class GroupExpired(Observation, frozen=True, kw_only=True):
    """A group has been generating for `groups.seconds_max`, whoever was there meanwhile: what it
    has by now is what it comes to."""

    group: str


class PlanPeriod(Observation, frozen=True, kw_only=True):
    """The planning period has passed."""


AnyObservation = LeaseExpired | Progressed | KvPressure | OffEngine | GroupExpired | PlanPeriod


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a dispatch stamps on a group; it never changes afterwards."""

    group: str
    ordinal: int
    purpose: Purpose
    version: int
    digest: str
    """Weights digest of `version` (hex)."""
    deadline: int
    """Last step that may train it: version + max_staleness at dispatch. -1 for evaluation."""
    partition: int
    dataset_digest: str
    index: int
    """Row of the data set."""
    data_epoch: int
    seed: int
    size: int
    """Siblings that it is complete with."""
    task: str = ""
    """Name of the task, where it has one."""
    evaluation: str = ""
    """Name of the evaluation that this is a row of, where it has one."""
    spare: int = 0
    """Siblings beside `size`: whichever `size` are valid first, count."""

    @property
    def siblings(self) -> int:
        return self.size + self.spare

    @property
    def source(self) -> str:
        """Which data, sampling and task processes it needs: `train`, `eval`, or with the name of
        the task or evaluation, as `train/NAME`."""
        return source_of(self.purpose, self.evaluation if self.purpose == "eval" else self.task)


class Decision(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kebab, omit_defaults=True
):
    """Base of the decisions; each can say why."""

    reason: str


class Dispatch(Decision, frozen=True, kw_only=True):
    """A group is admitted and stamped."""

    spec: GroupSpec
    skipped: tuple[int, ...] = ()
    """Rows whose turn it was and that are skipped in its favour, in order: `task.drop_solved`."""


class PlacedSibling(msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True):
    """One sibling of a `place`: under which attempt, and from where it goes on."""

    sibling: int
    attempt: int
    resume: Resume | None = None
    kv: Blob | None = None
    """The KV cache that a move left behind; the request is prefilled without it."""


class PlacedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it was placed: one sibling of a `place`, with what that says of all."""

    spec: GroupSpec
    trajectory: str
    sibling: int
    attempt: int
    worker: str
    epoch: int
    resume: Resume | None = None
    kv: Blob | None = None
    reason: str = ""


class Place(Decision, frozen=True, kw_only=True):
    """Requests of a group go to a worker, each under its own attempt number."""

    spec: GroupSpec
    worker: str
    epoch: int
    siblings: tuple[PlacedSibling, ...]
    """Which of the group, each with its attempt."""

    def requests(self) -> list[PlacedRequest]:
        """Every request by itself, in order."""
        return [
            PlacedRequest(
                spec=self.spec,
                trajectory=trajectory_id(self.spec.group, one.sibling),
                sibling=one.sibling,
                attempt=one.attempt,
                worker=self.worker,
                epoch=self.epoch,
                resume=one.resume,
                kv=one.kv,
                reason=self.reason,
            )
            for one in self.siblings
        ]


class Move(Decision, frozen=True, kw_only=True):
    """A worker shall let go of a running request, so that another of its version goes on with it.

    The worker answers with `request released`; only then is the request placed on `to`, or where
    its turn in the queue comes.
    """

    trajectory: str
    attempt: int
    worker: str
    epoch: int
    to: str
    """Worker that shall go on with it; empty: whichever is free, since this one is to sleep."""
    to_epoch: int
    """Incarnation of `to`; -1 without one."""


class Cancel(Decision, frozen=True, kw_only=True):
    """A running request is not needed any more."""

    trajectory: str
    attempt: int
    worker: str
    epoch: int


class Assign(Decision, frozen=True, kw_only=True):
    """A worker shall host a version; it finishes what it has first.

    One that hosts several at once takes it beside those that it has, and goes on with them. An
    elastic one may be assigned none (-1, without a digest): it sleeps once it has no request.
    """

    worker: str
    epoch: int
    version: int
    digest: str
    drop: tuple[int, ...] = ()
    """Versions that a worker which hosts several lets go of first: none of its requests has one."""


class Drain(Decision, frozen=True, kw_only=True):
    """A worker shall finish what it has, take nothing more, and leave."""

    worker: str
    epoch: int


class Fence(Decision, frozen=True, kw_only=True):
    """An incarnation of a worker is out: nothing it logs from now on counts."""

    worker: str
    epoch: int


class ScoreGroup(Decision, frozen=True, kw_only=True):
    """A worker shall score the siblings of a group together; it answers with `group scored`."""

    spec: GroupSpec
    worker: str
    epoch: int
    attempt: int
    trajectories: tuple[TakenTrajectory, ...]
    """The siblings with a valid reward, in order."""


class TakePart(Decision, frozen=True, kw_only=True):
    """Finished groups of the next step's batch, while that is not whole: they are due at this step
    from now on, and the trainer may begin with them. The batch names them again."""

    step: int
    attempt: int
    part: int
    """From 0; a part of this number that was taken before is given up, with those after it."""
    groups: tuple[TakenGroup, ...]
    settings: dict[str, float | int | str | bool]
    """Those of the batch that it becomes a part of: a change of settings gives parts up."""


class TakeBatch(Decision, frozen=True, kw_only=True):
    """The batch of a step, keyed (step, attempt): these groups, and no others."""

    step: int
    attempt: int
    groups: tuple[TakenGroup, ...]
    settings: dict[str, float | int | str | bool]
    """Logged configuration keys in force for this step, e.g. {"trainer.learning_rate": 3e-4}."""
    pins: tuple[int, ...] = ()
    """Versions that open groups carry or workers host or shall host, sorted. Of the versions below
    `step` none is added later: dispatches carry the newest."""
    parts: tuple[int, ...] = ()
    """How many of the groups, from the first on, each part has that was taken before, in order; the
    others are the last part. The gradient is added up part by part. Empty: the batch is one."""
    in_flight: float | None = None
    """C from now on, in batches, where `staleness.in_flight_batches` is `auto`, as far as
    `staleness.max_staleness` has room for it."""


class End(Decision, frozen=True, kw_only=True):
    """A group's fate, for every fate but `trained`."""

    group: str
    fate: Fate


class EndSiblings(Decision, frozen=True, kw_only=True):
    """The siblings of a group that it does not wait for have ended; those that ran are cancelled
    before. What is logged of them from now on is superseded."""

    group: str
    siblings: tuple[int, ...]
    """All that had no result, in order."""
    fate: SiblingFate


class StopRun(Decision, frozen=True, kw_only=True):
    """No group is open and no step is left (or a user stopped the run): every role may go."""


class Halt(Decision, frozen=True, kw_only=True):
    """Too many training groups fail: nothing more is decided until a user says `resume`.

    The orchestrator ends with it; open groups stay open.
    """

    error: str
    """What most of them failed with: class and first line."""
    trajectory: str
    """One that failed with it."""


class EarlyStop(Decision, frozen=True, kw_only=True):
    """The evaluation that is watched has got no better for long enough: the run ends when the
    groups in flight are trained, as by a user's `stop`."""

    evaluation: str
    """Its name; empty for the only one."""
    best: int
    """The version that was best; -1 where none had a figure."""


AnyDecision = (
    Dispatch
    | Place
    | Move
    | Cancel
    | Assign
    | Drain
    | Fence
    | ScoreGroup
    | TakePart
    | TakeBatch
    | End
    | EndSiblings
    | StopRun
    | Halt
    | EarlyStop
)


class Round(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One atomic turn of the orchestrator."""

    ordinal: int
    role_epoch: int
    now_ns: int
    """The orchestrator's clock; never decreases over the rounds of a run."""
    control_next: int
    """Control records with a smaller offset are folded, each in exactly one round."""
    observations: tuple[AnyObservation, ...] = ()
    decisions: tuple[AnyDecision, ...] = ()
    planned: bool = True
    """Whether a plan was made; none is while the log is still read, nor beside much other work."""
    state_digest: str | None = None
    """Digest of the state after this round, every `STATE_DIGEST_EVERY`-th and the last."""
    chain: str = ""
    """sha256 of the chain before, the control bytes folded, this round without it (`chain_of`)."""


FOREIGN_HINT: Final = "was it written by a later version of dora-pipe, or by somebody else?"

_DECODER = msgspec.json.Decoder(Round)


def decode_round(data: bytes) -> Round:
    """A round. Raises SchemaError; an unknown decision is one too: a fold must not skip it."""
    return decode(data, _DECODER)


class EpochGuard:
    """Reads rounds for a role that obeys them, and knows whether they follow one another.

    The first one may be any. A log that was cut and grew again, or a topic that somebody else
    writes to, shows here at once.
    """

    __slots__ = ("_epoch", "_ordinal")

    def __init__(self) -> None:
        self._epoch = -1
        self._ordinal: int | None = None

    def read(self, offset: int, value: bytes) -> Round | None:
        """The round at an offset of decisions; None for one of an older orchestrator.

        Raises SchemaError for what is no round, InvariantBroken when a round is missing, comes
        twice or is somebody else's: what was decided must not be skipped.
        """
        try:
            round_ = decode_round(value)
        except SchemaError as error:
            why = f"decisions offset {offset}: {error.message}"
            raise SchemaError(why, path=error.path, hint=FOREIGN_HINT) from None
        if round_.role_epoch < self._epoch:
            return None
        if self._ordinal not in (None, round_.ordinal - 1):
            raise InvariantBroken(
                f"decisions offset {offset}: round {round_.ordinal} comes after round "
                f"{self._ordinal}",
                hint="the log lost records, or somebody else writes to it; `dora-pipe audit` looks",
            )
        self._epoch, self._ordinal = round_.role_epoch, round_.ordinal
        return round_


def fold_bytes(offset: int, value: bytes) -> bytes:
    """What one control record contributes to the chain: its offset, its length, its bytes."""
    return offset.to_bytes(8, "big") + len(value).to_bytes(8, "big") + value


def seal(previous: str, folded: bytes, round_: Round) -> tuple[str, bytes]:
    """The chain after a round that has none yet, and the round's bytes with it; encoded once.

    `folded` is as for `chain_of`. The chain is the last field of a round.
    """
    assert not round_.chain
    bare = encode(round_)
    chain = sha256_hex(bytes.fromhex(previous), folded, bare)
    return chain, bare[:-1] + b',"chain":"' + chain.encode() + b'"}'


def chain_of(previous: str, folded: bytes, round_: Round) -> str:
    """sha256(previous chain, control bytes folded, this round without its chain); hex.

    `folded` is the concatenation of `fold_bytes` of the control records this round folds.
    """
    bare = encode(msgspec.structs.replace(round_, chain=""))
    return sha256_hex(bytes.fromhex(previous), folded, bare)

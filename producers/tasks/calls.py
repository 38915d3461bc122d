"""What the task pool is asked and what it answers, and the frames in which both travel.

A request has at most one call at a time. Its life is ``PromptCall``, for an episode some
``EnvStep``, then ``RewardCall`` (which ends the episode) or ``Forget``. Every call gets exactly
one event, `Forget` none:

    PromptCall -> PromptReady | TaskFailed | EpisodeLost
    EnvStep    -> EnvObserved | TaskFailed | EpisodeLost
    RewardCall -> Rewarded    | TaskFailed | EpisodeLost (only where an episode was to score)
    GroupCall  -> GroupRewarded | TaskFailed, of a request that has no other call
    AgentCall  -> AgentEnded | TaskFailed | EpisodeLost; it stands in place of the prompt

An episode that lies idle when its process dies gets an `EpisodeLost` too. `TaskFailed` is the
fault of that call (it raised, hung or killed its process): the trajectory is invalid, and
repeating would not help. `EpisodeLost` is the fault of another, or of something outside (`Retry`):
the request may start again.

Between the pool and its processes go frames: a length (4 bytes, big-endian) and JSON. Down the
pipe: `Setup`, then `Call`s. Up: `Hello` or `Refused`, then exactly one `CallAnswer` per call: in
order, but for calls of which `Deferred` stands in their place; those are answered at any time
later. A deferred call that is abandoned is answered too, and nobody listens. `EndEpisode` has no
answer. An episode is known by the number of the call that started it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from dora_pipe.config import model
from dora_pipe.core.frames import framed, unframed
from dora_pipe.producers.tasks.port import Split, Turn
from dora_pipe.producers.tasks.values import escaped
from dora_pipe.schemas.control import DataSet

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""A longer frame is no text that a model or environment wrote."""

MESSAGE_CHARS_MAX: Final = 300
"""Errors travel into every trajectory's record: one line, cut here."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of a request, or an event of it."""

    request: str


class PromptCall(Message, frozen=True, kw_only=True):
    """Ask for a row's prompt; starts an episode where the row has an environment.

    Example: ``PromptCall(request="g0000000042-003", split="train", index=17)``.
    """

    split: Split
    index: int
    source: str = ""
    """`GroupSpec.source`, for who has several pools."""


class EnvStep(Message, frozen=True, kw_only=True):
    """Hand a model turn to the request's episode."""

    turn: Turn


class RewardCall(Message, frozen=True, kw_only=True):
    """Score a finished trajectory. `text` is its last model turn, `turns` all segments but the
    prompt, in order. Goes to the request's episode where there is one, and ends it."""

    split: Split
    index: int
    text: str
    turns: tuple[str, ...]
    messages: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One of the completions of a `GroupCall`."""

    text: str
    turns: tuple[str, ...]
    turn: Turn | None = None
    """The last turn as the chat template's parser reads it, where prompts are messages."""


class GroupCall(Message, frozen=True, kw_only=True):
    """Score the answers to one row together."""

    split: Split
    index: int
    completions: tuple[Said, ...]


class AgentCall(Message, frozen=True, kw_only=True):
    """Run the task's agent on a row until it returns. It is not made again by anybody but who asks:
    what it has done meanwhile, in the calls of its session, only its worker knows."""

    split: Split
    index: int
    base_url: str
    api_key: str


class Forget(Message, frozen=True, kw_only=True):
    """Drop the request's call and episode without an event; unknown requests are ignored."""

    source: str = ""


class PromptReady(Message, frozen=True, kw_only=True):
    """The prompt, as text or as messages. With `episode`, finished turns go to `EnvStep`."""

    text: str
    episode: bool
    messages: tuple[dict[str, Any], ...] = ()
    """In normal form (`messages.normal`); empty: the prompt is `text`."""
    tools: tuple[dict[str, Any], ...] = ()
    """Schemas of the functions that the model may call."""
    replayable: bool = False
    """See `port.Task.replayable`."""


class EnvObserved(Message, frozen=True, kw_only=True):
    """What the environment answered (see `Observation`)."""

    text: str
    done: bool
    tool: str
    ok: bool
    error: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    """In normal form, in place of `text`."""


class Rewarded(Message, frozen=True, kw_only=True):
    """A valid reward, within `REWARD_MAX`; all numbers are finite."""

    reward: float
    raw: float | None
    parts: Mapping[str, float]
    answer: str = ""
    """At most `port.ANSWER_CHARACTERS_MAX` characters."""


class GroupRewarded(Message, frozen=True, kw_only=True):
    """What the answers to a row deserve beside each other, in order; all numbers are finite."""

    rewards: tuple[float, ...]
    parts: tuple[Mapping[str, float], ...]


class AgentEnded(Message, frozen=True, kw_only=True):
    """The agent has returned: a reward, a text to be scored, or neither."""

    rewarded: Rewarded | None = None
    text: str | None = None


class TaskFailed(Message, frozen=True, kw_only=True):
    """The call raised, hung, killed its process or gave something that is no answer.

    Example: ``TaskFailed(request=..., error="TimedOut", message="timed out after 10 s")``.
    """

    error: str
    """Class of what was raised, or `TimedOut`, `ProcessDied`, `NoAnswer`, `Retry`."""
    message: str
    """One line of at most `MESSAGE_CHARS_MAX` characters."""


class EpisodeLost(Message, frozen=True, kw_only=True):
    """The process that held the request's episode is gone, for no fault of the request."""

    message: str


TaskCall = PromptCall | EnvStep | RewardCall | GroupCall | AgentCall
Answered = PromptReady | EnvObserved | Rewarded | GroupRewarded | AgentEnded | TaskFailed
"""Events that come from a task process."""
TaskEvent = Answered | EpisodeLost


class PipeFrame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what travels."""


class Setup(PipeFrame, frozen=True):
    """The first frame: what to serve, and whose death ends it."""

    task: model.Task
    parent_pid: int


class Call(PipeFrame, frozen=True):
    """A call, with the episode that it is for."""

    number: int
    episode: int | None
    call: TaskCall
    limit_s: float = 0.0
    """What a try at it may take; 0: as long as it likes."""


class EndEpisode(PipeFrame, frozen=True):
    """Close an episode; unknown ones are ignored."""

    episode: int


class Abandon(PipeFrame, frozen=True):
    """Cancel a deferred call: its time is up, or its request forgotten."""

    number: int


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a task brings; equal in every process of a run. Digests are hex sha256."""

    train_digest: str
    train_rows: int
    eval_digest: str
    eval_rows: int
    reward_digest: str
    """Empty where the source cannot be known."""
    single_turn: bool = True
    """No prompt has an environment."""
    replayable: bool = False
    """See `port.Task.replayable`."""
    scores_groups: bool = False
    """The siblings of a group are also scored together."""
    packages: dict[str, str] = {}
    """See `Task.packages`."""
    notes: tuple[str, ...] = ()
    """See `Task.notes`."""

    def data(self, source: str) -> DataSet:
        """The rows of a source (`GroupSpec.source`) that this task serves."""
        if source.startswith("train"):
            return DataSet(digest=self.train_digest, rows=self.train_rows)
        return DataSet(digest=self.eval_digest, rows=self.eval_rows)


class StillOpening(PipeFrame, frozen=True):
    """Large data are made ready before the task is open, and it goes on."""


class Hello(PipeFrame, frozen=True):
    """The task is open."""

    facts: TaskFacts


class Refused(PipeFrame, frozen=True):
    """The task cannot be opened."""

    message: str
    hint: str | None
    config: bool
    """Whether it is the configuration's fault."""


class CallAnswer(PipeFrame, frozen=True):
    """What became of the call with this number."""

    number: int
    event: Answered | EpisodeLost
    late: bool = False
    """It was interrupted at its limit; the pool says which."""


class Deferred(PipeFrame, frozen=True):
    """The call with this number goes on beside the others; said again before every further try."""

    number: int
    pause_s: float = 0.0
    """It does so after a pause; its time limit begins then."""
    waiting: bool = False
    """It waits for a thread, and is said again, as no further try, when it has one."""


class Exhausted(PipeFrame, frozen=True):
    """The process holds threads that nobody can end: another is to take its place."""

    why: str
    at_once: bool = False
    """Not when its episodes have ended."""
    number: int = 0
    """The call that holds its main thread beyond its limit; 0: none."""


Down = Setup | Call | EndEpisode | Abandon
Up = StillOpening | Hello | Refused | CallAnswer | Deferred | Exhausted

_ENCODER = msgspec.json.Encoder()
DOWN: Final = msgspec.json.Decoder(Down)
UP: Final = msgspec.json.Decoder(Up)


def pack(frame: PipeFrame) -> bytes:
    """The bytes of a frame, half characters (lone surrogates) as their escapes. Raises ValueError
    where it is longer than `FRAME_BYTES_MAX`."""
    try:
        encoded = _ENCODER.encode(frame)
    except UnicodeEncodeError:
        encoded = _ENCODER.encode(escaped(msgspec.to_builtins(frame)))
    return framed(encoded, FRAME_BYTES_MAX)


def unpack(buffer: bytearray) -> Iterator[bytes]:
    """As `frames.unframed`, of frames that are no longer than `FRAME_BYTES_MAX`."""
    return unframed(buffer, FRAME_BYTES_MAX)


def one_line(text: str) -> str:
    """`text` on one line, cut at `MESSAGE_CHARS_MAX` characters."""
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    if len(line) <= MESSAGE_CHARS_MAX:
        return line
    return line[: MESSAGE_CHARS_MAX - 3] + "..."

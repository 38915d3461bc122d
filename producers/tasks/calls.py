"""Calls and events of the task pool, and their frames.

A request has one call at a time. Every call gets one event, `Forget` none:

    PromptCall -> PromptReady | TaskFailed | EpisodeLost
    EnvStep    -> EnvObserved | TaskFailed | EpisodeLost
    RewardCall -> Rewarded    | TaskFailed | EpisodeLost (only for an episode)
    GroupCall  -> GroupRewarded | TaskFailed
    AgentCall  -> AgentEnded | TaskFailed | EpisodeLost; replaces the prompt

The worker's machine counts in token ids: `worker.ports` replaces those of a call by text before it
reaches the pool, and adds those of the text in an event.

`TaskFailed` is the fault of the call: the trajectory is invalid and a retry would not help.
`EpisodeLost` has an external cause, also for idle episodes: the request may start again.

A frame is a length (4 bytes, big-endian) and JSON. The pool sends `Setup` and `Call`s; the process
sends `Hello` or `Refused`, then a `Progress` for each new state of a call, and its `CallAnswer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from dora_pipe.config import model
from dora_pipe.core.pure.frames import framed, unframed
from dora_pipe.producers.tasks.task import Completion, Split, Turn
from dora_pipe.producers.tasks.values import escaped
from dora_pipe.schemas.control import DataSet

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""Above any text of a model or environment."""

MESSAGE_CHARS_MAX: Final = 300
"""Limit of error messages, which are one line."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Call or event of a request."""

    request: str


class PromptCall(Message, frozen=True, kw_only=True):
    """Request a row's prompt, which may start an episode."""

    split: Split
    index: int
    source: str = ""


class EnvStep(Message, frozen=True, kw_only=True):
    """Send a model turn to the request's episode."""

    turn: Turn = Turn(text="")
    token_ids: Sequence[int] = ()
    """Replaced by `turn`."""
    source: str = ""


class SampledTurns(msgspec.Struct, frozen=True, kw_only=True):
    """Model turns and observations of a trajectory, as token ids."""

    answer: Sequence[int]
    """Last model turn."""
    turns: Sequence[Sequence[int]]
    """All turns after the prompt, in order."""
    before: Sequence[int] = ()
    """Token ids before `answer`, if a chat template must parse it."""


class RewardCall(Message, frozen=True, kw_only=True):
    """Score a trajectory and end its episode."""

    split: Split
    index: int
    completion: Completion = Completion(text="")
    sampled: SampledTurns | None = None
    """Replaced by `completion`."""
    agent_answer: str | None = None
    """Answer that an agent stated; becomes the text of `completion`."""
    source: str = ""


class GroupCall(Message, frozen=True, kw_only=True):
    """Score the answers to one row together."""

    split: Split
    index: int
    completions: tuple[Completion, ...] = ()
    """With the last message only."""
    sampled: tuple[SampledTurns, ...] = ()
    """Replaced by `completions`."""
    source: str = ""


class AgentCall(Message, frozen=True, kw_only=True):
    """Run the task's agent on a row; only the worker may repeat it."""

    split: Split
    index: int
    base_url: str = ""
    api_key: str = ""
    """Session of the request, added by the port."""
    source: str = ""


class Forget(Message, frozen=True, kw_only=True):
    """Drop the request's call and episode without an event."""

    source: str = ""


class PromptReady(Message, frozen=True, kw_only=True):
    """Prompt as text or messages."""

    text: str
    episode: bool
    messages: tuple[dict[str, Any], ...] = ()
    """In normal form; replaces `text`."""
    tools: tuple[dict[str, Any], ...] = ()
    replayable: bool = False
    """See `task.Task.replayable`."""
    token_ids: Sequence[int] = ()


class EnvObserved(Message, frozen=True, kw_only=True):
    """Answer of the environment; see `Observation`."""

    text: str
    done: bool
    tool: str
    ok: bool
    error: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    """In normal form; replaces `text`."""
    token_ids: Sequence[int] = ()


class Rewarded(Message, frozen=True, kw_only=True):
    """Reward; all numbers are finite."""

    reward: float
    raw: float | None
    parts: Mapping[str, float]
    answer: str = ""


class GroupRewarded(Message, frozen=True, kw_only=True):
    """Rewards of a group's answers, in order."""

    rewards: tuple[float, ...]
    parts: tuple[Mapping[str, float], ...]


class AgentEnded(Message, frozen=True, kw_only=True):
    """The agent returned a reward, text to score, or neither."""

    rewarded: Rewarded | None = None
    text: str | None = None


class TaskFailed(Message, frozen=True, kw_only=True):
    """The call raised, hung, killed its process or returned an invalid value."""

    error: str
    """Exception class, `TimedOut`, `ProcessDied`, `NoAnswer` or `Retry`."""
    message: str


class EpisodeLost(Message, frozen=True, kw_only=True):
    """The process of the episode ended, or its code raised `Retry` to the end."""

    message: str


TaskCall = PromptCall | EnvStep | RewardCall | GroupCall | AgentCall
Answered = PromptReady | EnvObserved | Rewarded | GroupRewarded | AgentEnded | TaskFailed
TaskEvent = Answered | EpisodeLost
TaskEffect = TaskCall | Forget

CallState = Literal["sent", "waiting", "main", "running"]
"""State of a call in its process: not begun, waiting for a thread or a pause, in the main thread,
in another thread or the event loop."""


class PipeFrame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class of frames."""


class Setup(PipeFrame, frozen=True):
    """First frame, with the process whose death ends the task."""

    task: model.Task
    parent_pid: int


class Call(PipeFrame, frozen=True):
    """Call with its episode."""

    number: int
    episode: int | None
    call: TaskCall


class EndEpisode(PipeFrame, frozen=True):
    """Close an episode."""

    episode: int


class Abandon(PipeFrame, frozen=True):
    """Cancel a call."""

    number: int


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a task. Digests are hex sha256."""

    train_digest: str
    train_rows: int
    eval_digest: str
    eval_rows: int
    reward_digest: str
    """Empty if the source is unknown."""
    single_turn: bool = True
    replayable: bool = False
    """See `task.Task.replayable`."""
    scores_groups: bool = False
    packages: dict[str, str] = {}
    """See `Task.packages`."""
    notes: tuple[str, ...] = ()
    """See `Task.notes`."""

    def data(self, source: str) -> DataSet:
        if source.startswith("train"):
            return DataSet(digest=self.train_digest, rows=self.train_rows)
        return DataSet(digest=self.eval_digest, rows=self.eval_rows)


class StillOpening(PipeFrame, frozen=True):
    """The task is still preparing data."""


class Hello(PipeFrame, frozen=True):
    """The task is open."""

    facts: TaskFacts


class Refused(PipeFrame, frozen=True):
    """The task cannot be opened."""

    message: str
    hint: str | None
    config: bool


class CallAnswer(PipeFrame, frozen=True):
    """Answer to the call with this number."""

    number: int
    event: Answered | EpisodeLost


class Progress(PipeFrame, frozen=True):
    """New state of the call with this number."""

    number: int
    state: CallState


class Exhausted(PipeFrame, frozen=True):
    """The process must be replaced; its episodes may finish."""

    why: str


Down = Setup | Call | EndEpisode | Abandon
Up = StillOpening | Hello | Refused | CallAnswer | Progress | Exhausted

_ENCODER = msgspec.json.Encoder()
DOWN: Final = msgspec.json.Decoder(Down)
UP: Final = msgspec.json.Decoder(Up)


def pack(frame: PipeFrame) -> bytes:
    """Encode a frame. Raises ValueError above `FRAME_BYTES_MAX`."""
    try:
        encoded = _ENCODER.encode(frame)
    except UnicodeEncodeError:
        encoded = _ENCODER.encode(escaped(msgspec.to_builtins(frame)))
    return framed(encoded, FRAME_BYTES_MAX)


def unpack(buffer: bytearray) -> Iterator[bytes]:
    return unframed(buffer, FRAME_BYTES_MAX)


def message_line(text: str) -> str:
    """Return an error message with its lines joined, shortened to `MESSAGE_CHARS_MAX`."""
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    if len(line) <= MESSAGE_CHARS_MAX:
        return line
    return line[: MESSAGE_CHARS_MAX - 3] + "..."

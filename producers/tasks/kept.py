"""Episodes of a server of tasks that outlive the connection through which they were begun: how they
are found, told and given up. What was told, and who has an episode, is `told`'s.

An episode is known by a key that follows from its trajectory. Who begins its trajectory again asks
every process of the server for the key, over a socket of its own in a folder that they share, and
goes on with what is there. It is told all turns from the first on: to those that it was told before
it answers as it did, to one that it is working on when that is done, and only what is new is a
step. So no step is lost and none is done twice, whatever was acknowledged.

    -> Take        <- Found | Missing      one connection for an episode
    -> Tell        <- Seen | Failed
    -> Score       <- Scored | Failed
    -> End         or the connection ends: then it is kept, for so many seconds

Who claims it with a later attempt takes it from who has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.core.frames import LENGTH_BYTES, framed
from dora_pipe.producers.tasks.answers import observed, scored
from dora_pipe.producers.tasks.background import PLACE, Background, Place, call_user_code
from dora_pipe.producers.tasks.calls import (
    FRAME_BYTES_MAX,
    EnvObserved,
    PipeFrame,
    PromptReady,
    Rewarded,
    one_line,
)
from dora_pipe.producers.tasks.port import Environment, Observation, Retry, Reward, Turn
from dora_pipe.producers.tasks.told import EpisodeTaken, ToldEpisode, ToldEpisodes

ASK_S: Final = 10.0
"""For a process to say whether it has an episode. One that is only slow has to be waited for: its
episode would begin a second time elsewhere."""

BEAT_S: Final = 0.2
"""A process without a connection says so often that it keeps episodes."""

SILENT_S: Final = 10.0
"""One that has not said so for so long keeps none: its loop is held by somebody's code."""


class RaisedThere(Exception):
    """What an environment raised in another process."""

    def __init__(self, error: str, message: str) -> None:
        """`error`: the name of its class."""
        super().__init__(message)
        self.error = error


class Take(PipeFrame, frozen=True):
    """Ask for an episode."""

    key: str
    attempt: int


class Found(PipeFrame, frozen=True):
    """It is here, and whoever asked has it."""

    ready: PromptReady
    scores: bool
    """It has a reward of its own."""


class Missing(PipeFrame, frozen=True):
    """It is not here, or a later attempt has it."""


class Tell(PipeFrame, frozen=True):
    """The next turn, counted from the first one on."""

    turn: Turn


class Seen(PipeFrame, frozen=True):
    """What the environment answers, or once answered, to it."""

    event: EnvObserved


class Score(PipeFrame, frozen=True):
    """Ask for the environment's reward."""

    text: str
    turns: tuple[str, ...]


class Scored(PipeFrame, frozen=True):
    """None: it leaves that to the task."""

    event: Rewarded | None


class Failed(PipeFrame, frozen=True):
    """What the environment raised."""

    error: str
    message: str


class End(PipeFrame, frozen=True):
    """Close the episode."""


Asked = Take | Tell | Score | End
Said = Found | Missing | Seen | Scored | Failed

_ENCODER: Final = msgspec.json.Encoder()
_ASKED: Final = msgspec.json.Decoder(Asked)
_SAID: Final = msgspec.json.Decoder(Said)


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept(ToldEpisode):
    """One of this process; what it was told has futures of the answers."""

    ready: PromptReady
    world: Environment

    async def tell(self, turn: Turn) -> Any:
        """A step that is new. One that is to be tried again has not been told."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = turn, answer
        self.told.append(entry)
        try:
            found = await call_user_code(self.world.respond, turn)
        except BaseException as error:
            if isinstance(error, Retry):
                self.told.remove(entry)
            given_up = isinstance(error, asyncio.CancelledError)
            answer.set_exception(EpisodeTaken("its step was given up") if given_up else error)
            answer.exception()  # nobody else need ask for it
            raise
        answer.set_result(found)
        return found


class Holder(Environment):
    """An episode as who has it sees it."""

    def __init__(self, kept: _Kept, end: Callable[[_Kept], Awaitable[None]]) -> None:
        self._kept, self._end = kept, end
        self._at = 0

    @property
    def has_it(self) -> bool:
        """Whether nobody else has taken it."""
        return self._kept.holder is self

    @property
    def kept(self) -> _Kept:
        return self._kept

    @property
    def scores(self) -> bool:
        """Whether it has a reward of its own."""
        return type(self._kept.world).reward is not Environment.reward

    async def respond(self, turn: Turn) -> Observation:
        """See Environment. Raises EpisodeTaken where it was told another turn before, or somebody
        else tells it now."""
        self._check()
        try:
            known = self._kept.is_known(self._at, turn)
        except EpisodeTaken:
            await self.close()
            raise
        if known:
            found: Observation = await asyncio.shield(self._kept.told[self._at][1])
        else:
            found = await self._kept.tell(turn)
        self._at += 1
        return found

    def reward(self, text: str, turns: Sequence[str]) -> Any:
        self._check()
        return self._kept.world.reward(text, turns)

    async def close(self) -> None:  # type: ignore[override]
        """See Environment: what somebody else has stays open."""
        if self.has_it:
            await self._end(self._kept)

    def _check(self) -> None:
        if not self.has_it:
            raise EpisodeTaken("a later attempt has it")


class KeptEpisodes:
    """The episodes of this process that others may claim, and those of others that it claims.

    All but `keep` and `close` runs in the loop of `background`.

    Example: ``KeptEpisodes(Path("/tmp/dora-pipe-kept-x"), 120.0, background, place)``.
    """

    def __init__(self, folder: Path, seconds: float, background: Background, place: Place) -> None:
        """`folder`: all processes of the server have it; `place`: where functions run that do not
        await."""
        self._folder, self._seconds = folder, seconds
        self._background, self._place = background, place
        self._path = folder / str(os.getpid())
        self._episodes = ToldEpisodes[_Kept]()
        self._listening: asyncio.Task[asyncio.Server] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def add(self, key: str, attempt: int, ready: PromptReady, world: Environment) -> Holder:
        """One that has just begun; whoever began it has it. Raises OSError where no socket can be
        made."""
        if self._listening is None:
            listen = asyncio.start_unix_server(self._serve, self._path)
            self._listening = asyncio.create_task(listen)
        await self._listening
        kept = _Kept(key=key, attempt=attempt, ready=ready, world=world)
        self._episodes.add(kept)
        return self._held(kept)

    def keep(self) -> None:
        """The connection has ended: wait, in the main thread, as long as there is an episode that
        somebody tells or may claim. Says that it does by touching its socket."""
        if not self._episodes:
            return
        try:
            self._background.run(self._release_all()).result(SILENT_S)
            while self._episodes:
                os.utime(self._path)
                time.sleep(BEAT_S)
                self._background.run(_beat()).result(SILENT_S)
        except (TimeoutError, OSError):
            return  # its loop is held, or the server has gone

    def close(self) -> None:
        """Nobody claims any more."""
        self._path.unlink(missing_ok=True)

    async def claim(self, key: str, attempt: int) -> ClaimedEpisode | None:
        """The episode, wherever on this server it is: all of its processes are asked at once."""
        asked = [_claimed(path, Take(key, attempt)) for path in sorted(self._folder.iterdir())]
        found = [one for one in await asyncio.gather(*asked) if one is not None]
        for other in found[1:]:
            await other.leave()
        return found[0] if found else None

    # What others ask

    def take(self, key: str, attempt: int) -> Holder | None:
        """Have an episode, unless a later attempt does."""
        kept = self._episodes.take(key, attempt)
        return None if kept is None else self._held(kept)

    def _held(self, kept: _Kept) -> Holder:
        holder = Holder(kept, self._end)
        kept.hold(holder)
        return holder

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One who claims an episode; a step goes on when its connection ends."""
        PLACE.set(self._place)
        holder: Holder | None = None
        running: asyncio.Task[None] | None = None
        try:
            async for frame in _frames(reader, _ASKED):
                if isinstance(frame, Tell | Score) and holder is not None:
                    running = asyncio.create_task(_answer(holder, frame, writer))
                elif isinstance(frame, Take) and holder is None:
                    holder = self.take(frame.key, frame.attempt)
                    found = holder and Found(holder.kept.ready, holder.scores)
                    _write(writer, found or Missing())
                else:
                    if running is not None:
                        running.cancel()
                    if holder is not None:
                        await holder.close()
                    break
        finally:
            if holder is not None:
                self._release(holder.kept, holder)
            writer.close()

    # Nobody comes

    async def _release_all(self) -> None:
        for kept in self._episodes.all():
            if kept.holder is not None and kept.generation == 1:  # no other connection has it
                self._release(kept, kept.holder)

    def _release(self, kept: _Kept, holder: object) -> None:
        """Who had it is gone; it is kept for a while."""
        if kept.leave(holder):
            loop = asyncio.get_running_loop()
            loop.call_later(self._seconds, self._expire, kept, kept.generation)

    def _expire(self, kept: _Kept, generation: int) -> None:
        if kept.is_over(generation):
            task = asyncio.create_task(self._end(kept))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end(self, kept: _Kept) -> None:
        """Close its environment. Nobody finds it any more."""
        self._episodes.end(kept)
        PLACE.set(self._place)
        try:
            await call_user_code(kept.world.close)
        except (Exception, SystemExit) as error:
            sys.stderr.write(f"task: {type(error).__name__}: {one_line(str(error))}\n")


class ClaimedEpisode(Environment):
    """An episode of another process of this server."""

    def __init__(
        self, found: Found, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.ready = found.ready
        self._scores = found.scores
        self._said = _frames(reader, _SAID)
        self._writer = writer

    async def respond(self, turn: Turn) -> Observation:
        seen = (await self._ask(Tell(turn), Seen)).event
        return Observation(
            text=seen.text,
            done=seen.done,
            messages=list(seen.messages),
            tool=seen.tool,
            ok=seen.ok,
        )

    def reward(self, text: str, turns: Sequence[str]) -> Any:
        """See Environment: awaited where it has one of its own."""
        return self._reward(text, turns) if self._scores else None

    async def _reward(self, text: str, turns: Sequence[str]) -> Reward | None:
        found = (await self._ask(Score(text, tuple(turns)), Scored)).event
        if found is None:
            return None
        parts = dict(found.parts)
        return Reward(value=found.reward, raw=found.raw, parts=parts, answer=found.answer)

    async def close(self) -> None:  # type: ignore[override]
        _write(self._writer, End())
        self._writer.close()

    async def leave(self) -> None:
        """Have no more to do with it; it is kept there for a while."""
        self._writer.close()

    async def _ask(self, asked: Asked, wanted: type[Any]) -> Any:
        _write(self._writer, asked)
        said = await anext(self._said, None)
        if isinstance(said, wanted):
            return said
        if not isinstance(said, Failed):
            raise EpisodeTaken("the process that kept it has ended")
        kinds = {"Retry": Retry, "EpisodeTaken": EpisodeTaken}
        raise (
            kinds[said.error](said.message)
            if said.error in kinds
            else RaisedThere(said.error, said.message)
        )


async def _answer(holder: Holder, frame: Tell | Score, writer: asyncio.StreamWriter) -> None:
    """What becomes of a turn, or of the question for a reward."""
    request = holder.kept.ready.request
    said: Said
    try:
        if isinstance(frame, Tell):
            said = Seen(observed(request, await holder.respond(frame.turn)))
        else:
            found = await call_user_code(holder.reward, frame.text, frame.turns)
            said = Scored(None if found is None else scored(request, found))
    except (Exception, SystemExit) as error:
        name = "Retry" if isinstance(error, Retry) else type(error).__name__
        said = Failed(name, one_line(str(error)))
    _write(writer, said)


async def _claimed(path: Path, take: Take) -> ClaimedEpisode | None:
    """What the process with this socket says; None also where it says nothing."""
    writer: asyncio.StreamWriter | None = None
    with contextlib.suppress(OSError, TimeoutError, msgspec.DecodeError):
        async with asyncio.timeout(ASK_S):
            reader, writer = await asyncio.open_unix_connection(path)
            _write(writer, take)
            found = await anext(_frames(reader, _SAID), None)
        if isinstance(found, Found):
            return ClaimedEpisode(found, reader, writer)
    if writer is not None:
        writer.close()
    return None


async def _frames(
    reader: asyncio.StreamReader, decoder: msgspec.json.Decoder[Any]
) -> AsyncIterator[Any]:
    """Frames to the end of a connection."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            if size > FRAME_BYTES_MAX:
                return
            yield decoder.decode(await reader.readexactly(size))


def _write(writer: asyncio.StreamWriter, frame: Asked | Said) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # nobody listens any more
        writer.write(framed(_ENCODER.encode(frame), FRAME_BYTES_MAX))


async def _beat() -> None:
    """The loop goes on."""

"""What another reward says of a run's texts, in a file beside the log; decides what is kept of it.

`rewards.jsonl` has a line a trajectory, with what that is worth alone; `groups.jsonl` has one for
each that was scored with its siblings, with what it counts; `about.json` says whose scores they
are. A line that was being written when somebody ended the process is cut off, and its trajectory
or group asked for again; what was lost to infrastructure (a time limit, a dead process, `Retry`)
is not written at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from dora_pipe.audit.line_file import append_lines, read_lines, write_whole
from dora_pipe.core.errors import ResourceError, UsageError

ABOUT: Final = "about.json"
REWARDS: Final = "rewards.jsonl"
GROUPS: Final = "groups.jsonl"


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Whose scores a file has. Example: ``About(run="demo", started_ns=17, reward="new:score",
    reward_digest="ab12...", package="0.9.0")``."""

    run: str
    started_ns: int
    """`run started`, which tells runs of the same name apart."""
    reward: str
    """As the command was given it; empty: the run's own."""
    reward_digest: str
    """sha256 of the code of the reward."""
    package: str
    """Version of dora-pipe that began the file."""
    together: Sequence[str] = ()
    """Sources (`identity.source_of`) whose siblings are scored together."""


class NewReward(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A trajectory's reward now.

    Example: ``NewReward(trajectory="g0000000042-003", reward=0.5)``
    """

    trajectory: str
    reward: float | None
    parts: dict[str, float] = {}
    error: str = ""
    """Why there is none."""


@dataclass(frozen=True, slots=True)
class RescoredFile:
    """The folder of one reward's scores.

    Example: ``RescoredFile(Path("runs/demo/rescored/ab12cd34ef56"))``
    """

    folder: Path

    @property
    def rewards(self) -> Path:
        """A line a trajectory."""
        return self.folder / REWARDS

    @property
    def groups(self) -> Path:
        """A line a trajectory that was scored with its siblings, those of a group in one piece."""
        return self.folder / GROUPS

    @property
    def stamp(self) -> tuple[int, ...]:
        """Changes whenever the scores do: when each file was written last (ns), and its bytes."""
        found = [one.stat() for one in (self.rewards, self.groups) if one.is_file()]
        return tuple(number for one in found for number in (one.st_mtime_ns, one.st_size))

    def about(self) -> About:
        """Whose scores these are. Raises UsageError, ResourceError."""
        file = self.folder / ABOUT
        try:
            return msgspec.json.decode(file.read_bytes(), type=About)
        except msgspec.DecodeError as error:
            raise UsageError(f"{file}: {error}", hint="another folder: --out DIR") from None
        except OSError as error:
            raise ResourceError(f"{file}: {error.strerror or error}") from error

    def begin(self, about: About) -> dict[str, NewReward]:
        """Make the folder, or take up what is there; what it has, by trajectory.

        Raises UsageError where it has other scores, ResourceError where it cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check(about)
        except OSError as error:
            raise ResourceError(f"{self.folder}: {error.strerror or error}") from error
        return self.read(self.rewards)

    def read(self, file: Path) -> dict[str, NewReward]:
        """What one of the two files has, by trajectory; somebody may be writing it. Raises as
        `begin`."""
        lines = read_lines(file, NewReward, hint="delete the file, or --out")
        return {one.trajectory: one for one in lines}

    def append(self, file: Path) -> IO[bytes]:
        """One of them, for lines of `line_of`. Raises ResourceError."""
        return append_lines(file)

    def _check(self, about: About) -> None:
        file = self.folder / ABOUT
        if not file.is_file():
            write_whole(file, about)
            return
        there = self.about()
        for name in ("run", "started_ns", "reward_digest"):
            if getattr(there, name) != getattr(about, name):
                raise UsageError(
                    f"{self.folder} has the scores of another {_WORDS[name]}",
                    hint="another folder: --out DIR",
                )


_WORDS: Final[dict[str, str]] = {
    "run": "run",
    "started_ns": "run of that name",
    "reward_digest": "reward",
}

"""What `rescore` and `fork` leave in a run's directory, made by hand for who reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.audit.fork import FOLDER as FORKS
from dora_pipe.audit.fork import Decided, Fork, ForkedTurn
from dora_pipe.audit.line_file import line_of
from dora_pipe.audit.rescored_file import About, NewReward, RescoredFile
from dora_pipe.audit.rescored_run import FOLDER
from dora_pipe.catalogue.database import Catalogue

DIGEST: Final = "ab" * 32
ID: Final = DIGEST[:12]
TURNS: Final = ((12, 0.81, 0.6, 0.95), (20, 0.94, 0.8, 1.0), (30, 0.12, 0.02, 0.4))
"""(token, mean, low, high) at the beginning of each turn."""


def score(directory: Path, *rewards: NewReward, digest: str = DIGEST) -> RescoredFile:
    """Scores of a reward that was called `new:score`."""
    file = RescoredFile(directory / FOLDER / digest[:12])
    about = About(run="r", started_ns=1, reward="new:score", reward_digest=digest, package="0")
    file.begin(about)
    with file.append(file.rewards) as lines:
        lines.writelines(map(line_of, rewards))
    return file


def inverted(tables: Catalogue) -> list[NewReward]:
    """One minus its reward for every trajectory that counts; none where it has none."""
    rows = tables.query(
        "select trajectory_id, reward from trajectories where record_offset is not null"
    )
    return [
        NewReward(trajectory=name, reward=None, error="ValueError: secret words")
        if reward is None
        else NewReward(trajectory=name, reward=1.0 - reward, parts={"no": 1.0})
        for name, reward in rows
    ]


def forked(directory: Path, trajectory: str, *, version: int = 7) -> Path:
    """A trajectory that was continued from each of its turns; the second one decided it."""
    turns = [
        ForkedTurn(
            token=token,
            turn=turn,
            samples=16,
            invalid=0,
            mean=mean,
            low=low,
            high=high,
            sampled=100,
            rewards=(),
        )
        for turn, (token, mean, low, high) in enumerate(TURNS)
    ]
    found = Fork(
        run="r",
        trajectory=trajectory,
        version=version,
        digest="cd" * 32,
        sampled_by=5,
        reward=0.0,
        length=61,
        turns=tuple(turns),
        decided=Decided(turn=1, token=20, end=30, before=0.94, after=0.12),
    )
    path = directory / FORKS / f"{trajectory}-v{version}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode(found))
    return path

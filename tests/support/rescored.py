"""What `rescore`, `fork` and `bisect` leave in a run's directory, made by hand for who reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.audit.bisect import Ask, Trial, Version
from dora_pipe.audit.fork import FOLDER as FORKS
from dora_pipe.audit.fork import Decided, Fork, ForkedTurn
from dora_pipe.audit.line_file import line_of
from dora_pipe.audit.probed_file import FOLDER as BISECTS
from dora_pipe.audit.probed_file import AboutProbe, BisectFound, KeptSuspect, ProbedFile
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


PROBE = "ab12cd34ef56"
"""The folder of a probe's values."""


def bisected(directory: Path, suspects: tuple[str, ...]) -> ProbedFile:
    """A fall between versions 5 and 7, and the trials that found the first of these suspects."""
    file = ProbedFile(directory / BISECTS / PROBE)
    file.begin(AboutProbe(run="r", started_ns=1, probe="eval", digest=DIGEST, engine="torch 2"))
    trials = (Trial(first=5, last=6, without=frozenset(suspects[:n])) for n in (len(suspects), 1))
    means = {Version(5): 15, Version(7): 6, Version(6): 7} | dict(
        zip(trials, (13, 14), strict=True)
    )
    for subject, good in means.items():
        file.add(Ask(subject=subject, draws=16), [1.0] * good + [0.0] * (16 - good))
    file.keep(
        BisectFound(
            good=5,
            bad=7,
            conclusion=["the value fell by 0.5", f"without {suspects[0]}: 0.38 -> 0.88"],
            like={"version 5": "given as good", "version 6": "bad", "version 7": "given as bad"},
            suspects=[
                KeptSuspect(name=name, step=5, deviations=9.0 - at, reasons=["rewards -9 to 1"])
                for at, name in enumerate(suspects)
            ],
        )
    )
    return file

"""Selection of the best version by one evaluation (`best`, `patience`), and early stopping.

Versions are judged in order, by their mean valid reward, once they and all earlier ones are
complete. Only a strictly better one replaces the best.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dora_pipe.config.model import Config, Evaluation
from dora_pipe.schemas.rounds import EarlyStop


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """Partial result of a version."""

    version: int
    groups: int = 0
    rewards: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        """Mean reward; None without valid rewards."""
        return self.total / self.rewards if self.rewards else None


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """State of the watched evaluation."""

    open: tuple[Evaluated, ...] = ()
    """Unjudged versions, in order."""
    best: int = -1
    """-1 if none."""
    reward: float = 0.0
    """Its mean reward."""
    waited: int = 0
    """Versions judged since the best."""
    stopped: bool = False


def watched_evaluation(config: Config) -> Evaluation | None:
    """Return the evaluation with `best` or `patience`, if any."""
    return next(
        (evaluation for evaluation in config.evaluations if evaluation.best or evaluation.patience),
        None,
    )


def begun(watched: Watched | None, version: int) -> Watched:
    """Add a dispatched version."""
    watched = watched or Watched()
    return msgspec.structs.replace(watched, open=(*watched.open, Evaluated(version=version)))


def ended(watched: Watched, version: int, rewards: Sequence[float], *, groups: int) -> Watched:
    """Add an ended group of a version with `groups` groups."""
    still_open = tuple(
        msgspec.structs.replace(
            evaluation,
            groups=evaluation.groups + 1,
            rewards=evaluation.rewards + len(rewards),
            total=evaluation.total + sum(rewards),
        )
        if evaluation.version == version
        else evaluation
        for evaluation in watched.open
    )
    watched = msgspec.structs.replace(watched, open=still_open)
    while watched.open and watched.open[0].groups >= groups:
        watched = _judged(watched)
    return watched


def _judged(watched: Watched) -> Watched:
    first, rest = watched.open[0], watched.open[1:]
    mean = first.mean
    if mean is not None and (watched.best < 0 or mean > watched.reward):
        return msgspec.structs.replace(
            watched, open=rest, best=first.version, reward=mean, waited=0
        )
    return msgspec.structs.replace(watched, open=rest, waited=watched.waited + 1)


def kept(watched: Watched | None, config: Config) -> set[int]:
    """Return versions that must be kept."""
    evaluation = watched_evaluation(config)
    if watched is None or evaluation is None or not evaluation.best:
        return set()
    return {watched.best, *(evaluation.version for evaluation in watched.open)} - {-1}


def stop_due(watched: Watched | None, config: Config) -> EarlyStop | None:
    """Return the early-stop decision if it is due."""
    evaluation = watched_evaluation(config)
    if watched is None or evaluation is None or not evaluation.patience or watched.stopped:
        return None
    if watched.waited < evaluation.patience:
        return None
    named = f"evaluation {evaluation.name}" if evaluation.name else "the evaluation"
    return EarlyStop(
        evaluation=evaluation.name,
        best=watched.best,
        reason=f"{named} of the last {watched.waited} versions was not better than that of version"
        f" {watched.best}, {watched.reward:.6g}",
    )

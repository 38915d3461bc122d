"""Decides which version an evaluation found the best, and when it has seen enough.

One evaluation of a run may be watched (`best`, `patience`). Its figure of a version is the mean of
the valid rewards of all its groups; versions are judged in their order, each when it and every
version before it is complete, so that no figure depends on which group was quicker. Better is
strictly better: of equal ones the first stays. The same functions check the decision to stop, so
audit makes it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dora_pipe.config.model import Config, Evaluation
from dora_pipe.schemas.rounds import EarlyStop


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """What is known so far of a version that is evaluated."""

    version: int
    groups: int = 0
    """Those that have ended."""
    rewards: int = 0
    """Valid ones."""
    total: float = 0.0
    """Their sum."""

    @property
    def mean(self) -> float | None:
        """None where no reward was valid."""
        return self.total / self.rewards if self.rewards else None


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What the state keeps of the evaluation that is watched."""

    open: tuple[Evaluated, ...] = ()
    """Versions that are not judged yet, in order."""
    best: int = -1
    """The version with the best figure; -1 while none has one."""
    reward: float = 0.0
    """Its figure."""
    waited: int = 0
    """Versions judged since, none of them better."""
    stopped: bool = False
    """The early stop was decided."""


def watched_evaluation(config: Config) -> Evaluation | None:
    """The evaluation whose figure counts, if one does."""
    return next((one for one in config.evaluations if one.best or one.patience), None)


def begun(watched: Watched | None, version: int) -> Watched:
    """A version's evaluation is dispatched."""
    watched = watched or Watched()
    return msgspec.structs.replace(watched, open=(*watched.open, Evaluated(version=version)))


def ended(watched: Watched, version: int, rewards: Sequence[float], *, groups: int) -> Watched:
    """A group of a version's evaluation, which has so many `groups`, has ended."""
    found = tuple(
        msgspec.structs.replace(
            one,
            groups=one.groups + 1,
            rewards=one.rewards + len(rewards),
            total=one.total + sum(rewards),
        )
        if one.version == version
        else one
        for one in watched.open
    )
    watched = msgspec.structs.replace(watched, open=found)
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
    """Versions whose files must stay: the best, and those that may yet be it."""
    evaluation = watched_evaluation(config)
    if watched is None or evaluation is None or not evaluation.best:
        return set()
    return {watched.best, *(one.version for one in watched.open)} - {-1}


def stop_due(watched: Watched | None, config: Config) -> EarlyStop | None:
    """The decision to stop early, if that is due now."""
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

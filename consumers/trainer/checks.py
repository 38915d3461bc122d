"""What the trainer does not take on trust: every claim of a batch decision against the record.

The orchestrator decides, everyone else obeys and checks. A batch that breaks C1 (one version per
trajectory) or C3 (step <= deadline) is refused here even if a decision says otherwise, because the
deadline and the digest stand in the trajectory's own headers too. Pure: no bus, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.control import Offender, TakenGroup, TakenTrajectory
from dora_pipe.schemas.headers import matches
from dora_pipe.schemas.identity import group_of, parse_trajectory_id
from dora_pipe.schemas.rounds import TakeBatch, TakePart
from dora_pipe.schemas.trajectory import Headers, Trajectory, mixing_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the trainer knows by itself when it is given a batch."""

    run: str
    next_step: int
    digests: Mapping[int, str]
    """Weights digest of every version that a group of this batch may have."""
    interruptible: bool
    """Whether a trajectory may go on under later versions than its group's."""
    trained: Mapping[str, int]
    """Groups that were trained already, by step, as far back as a deadline can reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What lies where a decision says that a trajectory lies. `why` says what is wrong with it."""

    headers: Headers | None = None
    sha256: str = ""
    """Of the value bytes, computed here."""
    trajectory: Trajectory | None = None
    why: str = ""


def check_batch(
    decision: TakeBatch | TakePart, arrived: Mapping[str, Arrived], known: Known
) -> tuple[Offender, ...]:
    """Why the batch, or a part of it, cannot be accepted; empty when it can. One line per
    offending trajectory.

    `arrived` has an entry per trajectory id of the decision.
    """
    return tuple(_offenders(decision, arrived, known))


def _offenders(
    decision: TakeBatch | TakePart, arrived: Mapping[str, Arrived], known: Known
) -> Iterator[Offender]:
    groups: set[str] = set()
    trajectories: set[str] = set()
    for group in decision.groups:
        why = _wrong_with_group(group, decision.step, known)
        if group.group in groups:
            why = "the batch names it twice"
        groups.add(group.group)
        if why:
            yield Offender(group=group.group, trajectory="", why=why)
            continue
        for taken in group.trajectories:
            found = arrived[taken.trajectory]
            why = _wrong_with(taken, group, found, decision.step, known)
            if taken.trajectory in trajectories:
                why = "the batch names it twice"
            trajectories.add(taken.trajectory)
            if why:
                yield Offender(group=group.group, trajectory=taken.trajectory, why=why)


def _wrong_with_group(group: TakenGroup, step: int, known: Known) -> str:
    """What is wrong with a group before any of its records is looked at; empty if nothing."""
    if step != known.next_step:
        return f"step {step} is not the next one, {known.next_step} is"
    if not group.trajectories:
        return "it has no trajectory"
    if not group.group.startswith("g"):
        return "it is not a training group"
    if group.group in known.trained:
        return f"it was trained at step {known.trained[group.group]} already"
    if group.version not in known.digests:
        return f"C1: version {group.version} does not exist before step {step}"
    if step > group.deadline:
        return f"C3: its deadline is step {group.deadline}, this is step {step}"
    return ""


def _wrong_with(
    taken: TakenTrajectory, group: TakenGroup, found: Arrived, step: int, known: Known
) -> str:
    """The first thing wrong with one trajectory; empty if nothing."""
    if found.why:
        return found.why
    headers, trajectory = found.headers, found.trajectory
    assert headers is not None
    assert trajectory is not None
    return (
        _wrong_identity(taken, group, headers, found.sha256, known)
        or _wrong_version(group, headers, known)
        or _wrong_segments(group, trajectory, step, known)
        or _wrong_deadline(group, headers, step)
        or _wrong_value(headers, trajectory)
        or _wrong_reward(group, trajectory)
    )


def _wrong_identity(
    taken: TakenTrajectory, group: TakenGroup, headers: Headers, sha256: str, known: Known
) -> str:
    if sha256 != taken.sha256:
        return f"sha256 of its value is {sha256[:12]}..., not {taken.sha256[:12]}..."
    if headers.sha256 != sha256:
        return "sha256 in its headers is not that of its value"
    if headers.run != known.run:
        return f"it belongs to run {headers.run}"
    if headers.trajectory != taken.trajectory:
        return f"the record there is {headers.trajectory}"
    if headers.group != group.group or not _is_in(taken.trajectory, group.group):
        return f"it belongs to group {headers.group}"
    if headers.attempt != taken.attempt:
        return f"the record there is of attempt {headers.attempt}, not {taken.attempt}"
    if headers.epoch != taken.epoch:
        return f"the record there is of role epoch {headers.epoch}, not {taken.epoch}"
    return ""


def _wrong_version(group: TakenGroup, headers: Headers, known: Known) -> str:
    """C1: what was sampled for a group is of its version, and of that version's weights."""
    if headers.version != group.version:
        return f"C1: it is of version {headers.version}, its group of {group.version}"
    if headers.digest != known.digests[group.version]:
        return f"C1: version {group.version} has other weights than {headers.digest[:12]}..."
    return ""


def _wrong_segments(group: TakenGroup, trajectory: Trajectory, step: int, known: Known) -> str:
    """C1: every token comes from the group's version; in an interruptible run from that or from
    later ones in order, none beyond the version that this step begins with, with their weights."""
    versions = set(trajectory.versions)
    if not versions - {group.version}:
        return ""
    if not known.interruptible:
        return f"C1: its segments are of versions {sorted(versions)}"
    if why := mixing_error(trajectory, step):
        return f"C1: {why}"
    weights = {one.version: one.digest for one in trajectory.meta.weights}
    for version in sorted(versions - {group.version}):
        if weights.get(version) != known.digests.get(version):
            return f"C1: version {version} has other weights than its segments name"
    return ""


def _wrong_deadline(group: TakenGroup, headers: Headers, step: int) -> str:
    """C3: what the trajectory itself says counts, whatever the decision says."""
    if step > headers.deadline:
        return f"C3: its headers say deadline {headers.deadline}, this is step {step}"
    if headers.deadline != group.deadline:
        return f"C3: its headers say deadline {headers.deadline}, the batch {group.deadline}"
    return ""


def _wrong_value(headers: Headers, trajectory: Trajectory) -> str:
    differing = matches(headers, trajectory)
    if differing:
        return f"its headers and its value differ in {', '.join(differing)}"
    if trajectory.meta.purpose != "train":
        return "it is not a training trajectory"
    return ""


def _wrong_reward(group: TakenGroup, trajectory: Trajectory) -> str:
    """A group that was scored together has a reward for every valid sibling and no other."""
    scored, valid = trajectory.trajectory in group.rewards, trajectory.reward is not None
    if group.rewards and scored != valid:
        return "the batch has a reward for it, or none, unlike its record"
    return ""


def _is_in(trajectory: str, group: str) -> bool:
    try:
        parse_trajectory_id(trajectory)
    except SchemaError:
        return False
    return group_of(trajectory) == group

"""Checks of a batch decision against its records.

Headers repeat deadline and digest, so violations of C1 (one version per trajectory) and C3 (step <=
deadline) are rejected whatever the decision says.
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
    """State known without the decision."""

    run: str
    next_step: int
    digests: Mapping[int, str]
    partial_rollout: bool
    """Partial rollout: segments may have later versions."""
    trained: Mapping[str, int]
    """Step by group, as far back as a deadline can reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Record at a decided place; `why` is its error."""

    headers: Headers | None = None
    sha256: str = ""
    trajectory: Trajectory | None = None
    why: str = ""


def check_batch(
    decision: TakeBatch | TakePart, arrived: Mapping[str, Arrived], facts: Known
) -> tuple[Offender, ...]:
    """Return why the batch or part is unacceptable, by trajectory or group."""
    return tuple(_offenders(decision, arrived, facts))


def _offenders(
    decision: TakeBatch | TakePart, arrived: Mapping[str, Arrived], facts: Known
) -> Iterator[Offender]:
    groups: set[str] = set()
    trajectories: set[str] = set()
    for group in decision.groups:
        why = _wrong_with_group(group, decision.step, facts)
        if group.group in groups:
            why = "the batch names it twice"
        groups.add(group.group)
        if why:
            yield Offender(group=group.group, trajectory="", reason=why)
            continue
        for taken in group.trajectories:
            record = arrived[taken.trajectory]
            why = _wrong_with(taken, group, record, decision.step, facts)
            if taken.trajectory in trajectories:
                why = "the batch names it twice"
            trajectories.add(taken.trajectory)
            if why:
                yield Offender(group=group.group, trajectory=taken.trajectory, reason=why)


def _wrong_with_group(group: TakenGroup, step: int, facts: Known) -> str:
    if step != facts.next_step:
        return f"step {step} is not the next one, {facts.next_step}"
    if not group.trajectories:
        return "it has no trajectory"
    if not group.group.startswith("g"):
        return "it is not a training group"
    if group.group in facts.trained:
        return f"it was already trained at step {facts.trained[group.group]}"
    if group.version not in facts.digests:
        return f"C1: version {group.version} does not exist before step {step}"
    if step > group.deadline:
        return f"C3: its deadline is step {group.deadline}, this is step {step}"
    return ""


def _wrong_with(
    taken: TakenTrajectory, group: TakenGroup, record: Arrived, step: int, facts: Known
) -> str:
    if record.why:
        return record.why
    headers, trajectory = record.headers, record.trajectory
    assert headers is not None
    assert trajectory is not None
    return (
        _wrong_identity(taken, group, headers, record.sha256, facts)
        or _wrong_version(group, headers, facts)
        or _wrong_segments(group, trajectory, step, facts)
        or _wrong_deadline(group, headers, step)
        or _wrong_value(headers, trajectory)
        or _wrong_reward(group, trajectory)
    )


def _wrong_identity(
    taken: TakenTrajectory, group: TakenGroup, headers: Headers, sha256: str, facts: Known
) -> str:
    if sha256 != taken.sha256:
        return f"sha256 of its value is {sha256[:12]}..., not {taken.sha256[:12]}..."
    if headers.sha256 != sha256:
        return "sha256 in its headers is not that of its value"
    if headers.run != facts.run:
        return f"it belongs to run {headers.run}"
    if headers.trajectory != taken.trajectory:
        return f"the record there is {headers.trajectory}"
    if headers.group != group.group or not _is_in(taken.trajectory, group.group):
        return f"it belongs to group {headers.group}"
    if headers.attempt != taken.attempt:
        return f"the record there is of attempt {headers.attempt}, not {taken.attempt}"
    if headers.incarnation != taken.incarnation:
        return f"the record there is of incarnation {headers.incarnation}, not {taken.incarnation}"
    return ""


def _wrong_version(group: TakenGroup, headers: Headers, facts: Known) -> str:
    if headers.version != group.version:
        return f"C1: it is of version {headers.version}, its group of {group.version}"
    if headers.digest != facts.digests[group.version]:
        return f"C1: version {group.version} has other weights than {headers.digest[:12]}..."
    return ""


def _wrong_segments(group: TakenGroup, trajectory: Trajectory, step: int, facts: Known) -> str:
    """C1: segments have the group's version, or with partial rollout later ones in order, up to the
    version this step starts from."""
    versions = set(trajectory.versions)
    if not versions - {group.version}:
        return ""
    if not facts.partial_rollout:
        return f"C1: its segments are of versions {sorted(versions)}"
    if why := mixing_error(trajectory, step):
        return f"C1: {why}"
    weights = {weight.version: weight.digest for weight in trajectory.meta.weights}
    for version in sorted(versions - {group.version}):
        if weights.get(version) != facts.digests.get(version):
            return f"C1: version {version} has other weights than its segments name"
    return ""


def _wrong_deadline(group: TakenGroup, headers: Headers, step: int) -> str:
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
    """A group scored together rewards exactly its valid trajectories."""
    scored, valid = trajectory.trajectory in group.rewards, trajectory.reward is not None
    if group.rewards and scored != valid:
        return "the reward in the batch differs from its record"
    return ""


def _is_in(trajectory: str, group: str) -> bool:
    try:
        parse_trajectory_id(trajectory)
    except SchemaError:
        return False
    return group_of(trajectory) == group

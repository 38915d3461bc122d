"""Corruptions of a copied recorded run by a disk, bug or forger.

Each takes a `Tamper` and returns the finding that audit must report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from dora_pipe.schemas.control import StepCommitted, TakenGroup
from dora_pipe.schemas.rounds import AnyDecision, Dispatch, End
from dora_pipe.schemas.trajectory import Trajectory
from tests.support.tamper import Tamper


def remove_trajectory(log: Tamper) -> str:
    row, fact = log.trained()
    log.remove(row)
    return fact.trajectory


def change_token(log: Tamper) -> str:
    row, fact = log.trained()
    log.put(replace(log.reencode(row, another_token), headers=row.headers))
    return fact.trajectory


def change_token_and_record(log: Tamper) -> str:
    row, fact = log.trained()
    log.put(log.reencode(row, another_token))
    return fact.trajectory


def change_version(log: Tamper) -> str:
    row, fact = log.trained()
    log.put(log.reencode(row, another_version))
    return fact.trajectory


def change_segment_version(log: Tamper) -> str:
    row, fact = log.trained()
    log.put(log.reencode(row, another_segment_version))
    return fact.trajectory


def change_logprob(log: Tamper) -> str:
    row, fact = log.trained()
    log.put(replace(log.reencode(row, another_logprob), headers=row.headers))
    return fact.trajectory


def double_step(log: Tamper) -> str:
    row, fact = log.facts(StepCommitted)[5]
    log.put(replace(row, offset=row.offset + 1))
    return f"step {fact.step}"


def remove_step(log: Tamper) -> str:
    row, fact = log.facts(StepCommitted)[5]
    log.remove(row)
    return f"step {fact.step}"


def remove_last_step(log: Tamper) -> str:
    row, fact = log.facts(StepCommitted)[-1]
    log.remove(row)
    return f"step {fact.step}"


def train_fenced(log: Tamper) -> str:
    used = {
        trajectory.trajectory: trajectory
        for _, fact in log.facts(StepCommitted)
        for group in fact.groups
        for trajectory in group.trajectories
    }
    fenced = next(
        fact
        for *_, fact in log.logged()
        if fact.trajectory in used and used[fact.trajectory].incarnation != fact.incarnation
    )

    def change(step: int, group: TakenGroup) -> TakenGroup:
        trajectories = tuple(
            msgspec.structs.replace(
                trajectory,
                attempt=fenced.attempt,
                incarnation=fenced.incarnation,
                partition=fenced.partition,
                offset=fenced.offset,
                sha256=fenced.sha256,
            )
            if trajectory.trajectory == fenced.trajectory
            else trajectory
            for trajectory in group.trajectories
        )
        return msgspec.structs.replace(group, trajectories=trajectories)

    log.rebatch(change)
    return fenced.trajectory


def train_beyond_deadline(log: Tamper) -> str:
    batches = {fact.step: fact.groups for _, fact in log.facts(StepCommitted)}
    step, early, late_step, late = next(
        (step, early, late_step, late)
        for step, groups in batches.items()
        for early in groups
        for late_step, batch in batches.items()
        for late in batch
        if late_step > early.deadline and late.version <= step
    )

    def change(position: int, group: TakenGroup) -> TakenGroup:
        if position == step and group.group == early.group:
            return late
        return early if position == late_step and group.group == late.group else group

    log.rebatch(change)
    return early.group


def change_round(log: Tamper) -> str:
    row, round_ = next(
        (row, round_)
        for row, round_ in log.rounds()[10:]
        if any(isinstance(decision, Dispatch) for decision in round_.decisions)
    )
    decisions = list(round_.decisions)
    index, entry = next(
        (index, decision)
        for index, decision in enumerate(decisions)
        if isinstance(decision, Dispatch)
    )
    spec = msgspec.structs.replace(entry.spec, index=entry.spec.index + 1)
    decisions[index] = msgspec.structs.replace(entry, spec=spec)
    log.rewrite(row, msgspec.structs.replace(round_, decisions=tuple(decisions)))
    return spec.group


def change_reward(log: Tamper) -> str:
    row, record, index, fact = next(entry for entry in log.logged()[40:] if entry[-1].reward == 0.0)
    log.log_otherwise(row, record, index, reward=1.0)
    return fact.trajectory


def change_answer(log: Tamper) -> str:
    row, record, index, fact = next(entry for entry in log.logged()[40:] if entry[-1].reward == 0.0)
    log.log_otherwise(row, record, index, answer="42")
    return fact.trajectory


def change_part(log: Tamper) -> str:
    row, record, index, fact = next(entry for entry in log.logged()[40:] if entry[-1].parts)
    log.log_otherwise(row, record, index, parts={"exact": 0.5})
    return fact.trajectory


def change_weights(log: Tamper) -> str:
    _, fact = log.facts(StepCommitted)[5]
    flip_last_byte(log.run.store / "weights" / f"{fact.digest_after}.safetensors")
    return f"version {fact.step + 1}"


def change_contributions(log: Tamper) -> str:
    _, fact = log.facts(StepCommitted)[5]
    flip_last_byte(log.run.store / "contributions" / f"{fact.contributions.sha256}.arrow")
    return f"contributions of step {fact.step}"


def change_checkpoint(log: Tamper) -> str:
    fact = next(fact for _, fact in log.facts(StepCommitted) if fact.checkpoint is not None)
    assert fact.checkpoint is not None
    flip_last_byte(log.run.store / "optimizer" / f"{fact.checkpoint.sha256}.safetensors")
    return f"checkpoint of step {fact.step}"


def mix_in_another_run(log: Tamper) -> str:
    row, fact = log.trained()
    last = max(
        entry.offset for entry in log.rows("trajectories") if entry.partition == row.partition
    )

    def change(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, meta=msgspec.structs.replace(trajectory.meta, run="other"))

    log.put(replace(log.reencode(row, change), offset=last + 1))
    return fact.trajectory


def forge_everything(log: Tamper, change: Callable[[Trajectory], Trajectory] | None = None) -> str:
    """Change a token (or apply `change`) and fix every sha256 and digest."""
    row, fact = log.trained()
    changed = log.reencode(row, change or another_token)
    sha256 = dict(changed.headers)["sha256"].decode()
    log.put(changed)
    for index, record, location, entry in log.logged():
        if (entry.partition, entry.offset) == (row.partition, row.offset):
            log.log_otherwise(index, record, location, sha256=sha256, bytes=len(changed.value))

    def retake(step: int, group: TakenGroup) -> TakenGroup:
        trajectories = tuple(
            msgspec.structs.replace(trajectory, sha256=sha256)
            if trajectory.trajectory == fact.trajectory
            else trajectory
            for trajectory in group.trajectories
        )
        return msgspec.structs.replace(group, trajectories=trajectories)

    log.rebatch(retake)
    log.mend()
    return fact.trajectory


def flip_last_byte(path: Path) -> None:
    """Change the byte that readers are least likely to notice."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def another_token(trajectory: Trajectory) -> Trajectory:
    ids = list(trajectory.token_ids)
    index = list(trajectory.loss_mask).index(1)
    ids[index] = ids[index] + 1 if ids[index] < 90 else 5
    return replace(trajectory, token_ids=ids)


def another_logprob(trajectory: Trajectory) -> Trajectory:
    index = len(trajectory.logprobs) - 1
    values = [*trajectory.logprobs[:index], -0.125]
    return replace(trajectory, logprobs=values, sampler_logprobs=values)


def another_version(trajectory: Trajectory) -> Trajectory:
    segments = [
        msgspec.structs.replace(segment, version=trajectory.version + 1)
        for segment in trajectory.segments
    ]
    return replace(trajectory, version=trajectory.version + 1, segments=segments)


def another_segment_version(trajectory: Trajectory) -> Trajectory:
    segments = [
        msgspec.structs.replace(segment, version=trajectory.version + 1)
        for segment in trajectory.segments
    ]
    return replace(trajectory, segments=segments)


def forge_evaluation(log: Tamper) -> str:
    """Change the reward of an evaluation in record, control and digests."""
    rows = {(row.partition, row.offset): row for row in log.rows("trajectories")}
    index, record, location, fact = next(
        fact
        for fact in log.logged()
        if fact[-1].trajectory.startswith("e") and fact[-1].reward == 0.0
    )
    row = rows[fact.partition, fact.offset]

    def change(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, reward=1.0)

    changed = log.reencode(row, change)
    log.put(changed)
    sha256 = dict(changed.headers)["sha256"].decode()
    log.log_otherwise(index, record, location, reward=1.0, sha256=sha256, bytes=len(changed.value))
    log.decide_otherwise(lambda value: _with_mean(value, fact.group))
    log.mend()
    return fact.trajectory


def _with_mean(decision: AnyDecision, group: str) -> AnyDecision:
    if not isinstance(decision, End) or decision.group != group:
        return decision
    reason = decision.reason.replace("mean reward 0.0000", "mean reward 1.0000")
    return msgspec.structs.replace(decision, reason=reason)

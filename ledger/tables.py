"""Tables of the catalogue: one Struct per table, one field per column."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_type_hints

import msgspec

FORM: Final = 14
"""Bump to rebuild saved catalogues."""


@dataclass(frozen=True, slots=True)
class Sql:
    """Column type that is not in `SQL_TYPES`."""

    name: str


SQL_TYPES: Final[dict[type, str]] = {
    int: "BIGINT",
    float: "DOUBLE",
    str: "VARCHAR",
    bool: "BOOLEAN",
}

Small = Annotated[int, Sql("INTEGER")]


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of the tables."""


class RunRow(Row, frozen=True, kw_only=True, gc=False):
    """The run, in one row."""

    run: Annotated[str, "Name of the run."]
    first_ns: Annotated[int, "Earliest time in control and decisions."]
    started_ns: Annotated[int, "Time of `run started`."]
    last_ns: Annotated[int, "Latest time in control and decisions."]
    stopped: Annotated[bool, "Whether a decision stopped the run."]
    rounds: Annotated[int, "Rounds of the orchestrator read so far."]
    seed: Annotated[int, "Seed of the run."]
    planner: Annotated[str, "Name and version of the planner."]
    package: Annotated[str, "Version of dora-pipe that started the run."]
    schema_version: Annotated[Small, "Version of the record schemas."]
    config: Annotated[str, Sql("JSON"), "Resolved configuration from `run started`."]
    config_digest: Annotated[str, "SHA-256 of the configuration."]
    dataset_digest: Annotated[str, "Digest of the training rows."]
    dataset_rows: Annotated[int, "Number of training rows."]
    eval_digest: Annotated[str, "Digest of the evaluation rows."]
    eval_rows: Annotated[int, "Number of evaluation rows."]
    assets_digest: Annotated[str, "Digest of the model's configuration and tokenizer."]
    lineage_run: Annotated[str | None, "Run of the initial weights (`run --from`)."]
    lineage_step: Annotated[int | None, "Step of the initial weights."]


class WorkerRow(Row, frozen=True, kw_only=True, gc=False):
    """An incarnation of a worker."""

    worker: Annotated[str, "Name of the worker."]
    incarnation: Annotated[int, "Incarnation: the offset of its `worker joined`."]
    joined_ns: Annotated[int, "Time of `worker joined`."]
    gone_ns: Annotated[int | None, "Time the incarnation left or was fenced."]
    departure: Annotated[str | None, "`left` or `fenced`."]
    end_reason: Annotated[str | None, "Reason of the departure."]
    slots: Annotated[Small, "Requests that can run at the same time."]
    prefetch: Annotated[Small, "Requests queued on the worker ahead of a free slot."]
    kv_tokens: Annotated[int, "Capacity of the KV cache, tokens."]
    engine: Annotated[str, "Kind of the engine."]
    engine_version: Annotated[str, "Version of the engine."]
    device: Annotated[str, "Device of the engine."]
    dtype: Annotated[str, "Data type of the computation."]
    reward_digest: Annotated[str, "SHA-256 of the reward's code; empty if unknown."]
    template_digest: Annotated[str, "SHA-256 of the chat template and tokenizer; empty if none."]
    host: Annotated[str, "Machine of the worker."]
    pid: Annotated[Small, "Process id on that machine."]


class ServedVersionRow(Row, frozen=True, kw_only=True, gc=False):
    """A version that a worker loaded. The worker serves it until it loads or drops another.
    Version -1: the worker sleeps."""

    worker: Annotated[str, "Name of the worker."]
    incarnation: Annotated[int, "Incarnation of the worker."]
    version: Annotated[Small, "Policy version."]
    assigned_ns: Annotated[int | None, "Time of the assignment."]
    ready_ns: Annotated[int, "Time of `worker ready`."]
    load_ms: Annotated[float, "Duration of the load, ms."]


class VersionRow(Row, frozen=True, kw_only=True, gc=False):
    """A published policy version."""

    version: Annotated[Small, "Number of committed steps; 0: the initial weights."]
    digest: Annotated[str, "Weights digest, hex."]
    published_ns: Annotated[int, "Time of `run started` or of the commit."]


class BatchRow(Row, frozen=True, kw_only=True, gc=False):
    """A batch decision."""

    step: Annotated[Small, "Step of the batch."]
    attempt: Annotated[Small, "Attempt at the batch, from 1."]
    round: Annotated[int, "Round of the decision."]
    free_ns: Annotated[int | None, "Time the trainer became free for it; null: unknown."]
    taken_ns: Annotated[int, "Time of the decision."]
    ended_ns: Annotated[int | None, "Time of the commit or failure."]
    groups: Annotated[Small, "Number of groups."]
    parts: Annotated[Small, "Number of parts it was taken in."]
    last_trajectory: Annotated[str | None, "Trajectory that was logged last."]
    batch_reason: Annotated[str, "Reason of the decision."]
    outcome: Annotated[
        str | None,
        "`committed`, `refused`, `failed`, or `overtaken` by a newer attempt; null: in training.",
    ]
    end_reason: Annotated[str, "Reason of an outcome other than `committed`."]


class PartRow(Row, frozen=True, kw_only=True, gc=False):
    """A part of a committed step's batch, if the batch was taken in parts."""

    step: Annotated[Small, "Step of the batch."]
    part: Annotated[Small, "Number of the part, from 0; the last comes with the batch."]
    free_ns: Annotated[int, "Time the trainer became free for it."]
    taken_ns: Annotated[int, "Time of the decision."]
    begun_ns: Annotated[int, "Start of the computation: the later of both."]
    waited_s: Annotated[float, "Time the idle trainer waited for the part, s."]
    seconds: Annotated[float | None, "Computation before the batch, s; null: with the batch."]
    last_trajectory: Annotated[str | None, "Trajectory of the part that was logged last."]
    batch_reason: Annotated[str, "Reason of the decision."]
    groups: Annotated[Small, "Number of groups."]
    trajectories: Annotated[Small, "Number of trajectories."]
    tokens: Annotated[int, "Sampled tokens."]


class StepRow(Row, frozen=True, kw_only=True, gc=False):
    """A committed training step."""

    step: Annotated[Small, "Number of the step: trains version `step` into `step + 1`."]
    attempt: Annotated[Small, "Attempt at the batch that was committed."]
    control_offset: Annotated[int, "Offset of the commit in control."]
    free_ns: Annotated[int | None, "Time the trainer became free; null: unknown."]
    taken_ns: Annotated[int, "Time of the batch decision."]
    committed_ns: Annotated[int, "Time of the commit."]
    seconds: Annotated[float | None, "From `free_ns` to the commit, without stops of the run, s."]
    stopped_s: Annotated[float, "Stops of the run in between, s."]
    waited_s: Annotated[float, "Idle time without a batch or part, s; included in `seconds`."]
    early_s: Annotated[float, "Computation of parts before the batch, s; included in `seconds`."]
    overlap_s: Annotated[
        float, "Computation of a part while the previous version was published, s."
    ]
    compute_s: Annotated[float, "Forward, backward and update, s; included in `seconds`."]
    waited_for: Annotated[str | None, "Trajectory that was logged last, if the trainer waited."]
    waited_worker: Annotated[str | None, "Worker of that trajectory."]
    waited_version: Annotated[int | None, Sql("INTEGER"), "Version of that trajectory."]
    batch_reason: Annotated[str, "Reason of the batch decision."]
    groups: Annotated[Small, "Number of groups."]
    trajectories: Annotated[Small, "Number of trajectories."]
    valid: Annotated[Small, "Trajectories with a valid reward."]
    reward: Annotated[float | None, "Mean of the valid rewards."]
    reward_raw: Annotated[float | None, "Mean reward; invalid rewards count as 0."]
    reward_low: Annotated[float | None, "First quartile of the groups' mean rewards."]
    reward_high: Annotated[float | None, "Third quartile of the groups' mean rewards."]
    tokens: Annotated[int, "Sampled tokens."]
    tokens_p10: Annotated[
        int | None, Sql("INTEGER"), "10th percentile of sampled tokens per trajectory."
    ]
    tokens_p50: Annotated[int | None, Sql("INTEGER"), "Median of them."]
    tokens_p90: Annotated[int | None, Sql("INTEGER"), "90th percentile of them."]
    tokens_max: Annotated[int | None, Sql("INTEGER"), "Maximum of them."]
    staleness_min: Annotated[Small, "Minimum staleness of its groups."]
    staleness_mean: Annotated[float, "Mean staleness of its groups."]
    staleness_max: Annotated[Small, "Maximum staleness of its groups."]
    bound: Annotated[Small, "Largest staleness bound of its groups."]
    over_bound: Annotated[Small, "Groups trained after their deadline; above 0 violates C3."]
    loss: Annotated[float | None, "Loss."]
    grad_norm: Annotated[float | None, "Gradient norm."]
    reward_parts: Annotated[
        str | None, Sql("JSON"), 'Mean of each reward component, by task (`""`: unnamed).'
    ]
    metrics: Annotated[str, Sql("JSON"), "All metrics of the commit."]
    settings: Annotated[str, Sql("JSON"), "Logged configuration keys in force."]
    digest_before: Annotated[str, "Weights digest before the step."]
    digest_after: Annotated[str, "Weights digest after the step."]
    contributions: Annotated[str, "SHA-256 of the file with each trajectory's contribution."]
    adopted: Annotated[bool, "Whether the weights before it were adopted instead of replayed."]


class GroupRow(Row, frozen=True, kw_only=True, gc=False):
    """A dispatched group: the trajectories of one prompt."""

    group_id: Annotated[str, "Group id: `g...` for training, `e...` for evaluation."]
    purpose: Annotated[str, "`train` or `eval`."]
    task: Annotated[str, "Name of the task; empty if unnamed."]
    evaluation: Annotated[str, "Name of the evaluation; empty if none or unnamed."]
    ordinal: Annotated[int, "Number of the dispatch, per purpose."]
    version: Annotated[Small, "Policy version that samples the group."]
    deadline: Annotated[Small, "Last step that may train the group; -1 for evaluation."]
    row: Annotated[int, "Row of the data set."]
    data_epoch: Annotated[Small, "Pass over the data, from 0."]
    dataset_digest: Annotated[str, "Digest of the data set's rows."]
    seed: Annotated[int, "Seed of its sampling."]
    size: Annotated[Small, "Trajectories needed to complete the group."]
    redundancy: Annotated[Small, "Redundant trajectories: the first `size` valid ones count."]
    round: Annotated[int, "Round of the dispatch."]
    dispatch_reason: Annotated[str, "Reason of the dispatch."]
    dispatched_ns: Annotated[int, "Time of dispatch."]
    complete_ns: Annotated[int | None, "Time its last counting trajectory was logged."]
    taken_ns: Annotated[int | None, "Time a batch, or a part of one, took it."]
    ended_ns: Annotated[int | None, "Time it got its outcome."]
    outcome: Annotated[str, "`open`, `trained`, `filtered`, `failed`, `cancelled`, `evaluated`."]
    end_reason: Annotated[str, "Reason of the outcome."]
    step: Annotated[int | None, Sql("INTEGER"), "Step of its batch or commit."]
    part: Annotated[
        int | None, Sql("SMALLINT"), "Part of the batch, from 0, if it was taken in parts."
    ]
    staleness: Annotated[int | None, Sql("INTEGER"), "Step minus version, if trained."]
    results: Annotated[Small, "Trajectories whose record counts."]
    valid: Annotated[Small, "Trajectories with a valid reward."]
    reward: Annotated[float | None, "Mean of the valid rewards."]
    tokens: Annotated[int, "Sampled tokens of the records that count."]


class TrajectoryRow(Row, frozen=True, kw_only=True, gc=False):
    """A trajectory of a dispatched group, with the record that counts for it."""

    trajectory_id: Annotated[str, "Trajectory id: group id and sample."]
    group_id: Annotated[str, "Group id."]
    sample: Annotated[int, Sql("SMALLINT"), "Index in the group, from 0."]
    outcome: Annotated[
        str | None,
        "Why its group did not wait for it: `redundant` or `expired`; null: the group's outcome.",
    ]
    attempts: Annotated[int, Sql("SMALLINT"), "Number of attempts."]
    scheduled_ns: Annotated[int | None, "Time it was first scheduled on a worker."]
    worker: Annotated[str | None, "Worker of the newest attempt."]
    incarnation: Annotated[int | None, "Incarnation of that worker."]
    attempt: Annotated[int | None, Sql("SMALLINT"), "Number of the newest attempt."]
    logged_ns: Annotated[int | None, "Time its record was logged."]
    partition: Annotated[int | None, Sql("INTEGER"), "Partition of its record."]
    record_offset: Annotated[int | None, "Offset of its record."]
    tokens: Annotated[int | None, Sql("INTEGER"), "Sampled tokens."]
    reward: Annotated[float | None, "Reward; null without a record or valid reward."]
    group_parts: Annotated[str | None, "Group scores by name, as JSON."]
    finish: Annotated[str | None, "`stop`, `length`, `environment`, `error`."]
    error_class: Annotated[str | None, "Class of the reward error, such as `TimedOut`."]
    error: Annotated[str | None, "Class, place and message of the reward error."]
    reward_answer: Annotated[str | None, "Answer that the reward extracted."]
    reward_parts: Annotated[str | None, Sql("JSON"), "Reward components by name."]
    contexts: Annotated[int | None, Sql("INTEGER"), "Contexts of its record; above 1: it branches."]
    calls: Annotated[int | None, Sql("INTEGER"), "Agent calls of its record."]


class AttemptRow(Row, frozen=True, kw_only=True, gc=False):
    """An attempt at a trajectory on one worker."""

    trajectory_id: Annotated[str, "Trajectory id."]
    attempt: Annotated[int, Sql("SMALLINT"), "Number of the attempt, from 1."]
    worker: Annotated[str, "Name of the worker."]
    incarnation: Annotated[int, "Incarnation of the worker."]
    round: Annotated[int, "Round that scheduled it."]
    scheduled_ns: Annotated[int, "Time it was scheduled."]
    ended_ns: Annotated[int | None, "Time it ended; null while it runs."]
    outcome: Annotated[
        str | None,
        "`logged`, `migrated`, `failed`, `cancelled`, or its worker's departure: `left`, `fenced`.",
    ]
    resumed_tokens: Annotated[Small, "Sampled tokens it resumed from; 0: from the prompt."]
    schedule_reason: Annotated[str | None, "Reason of the choice of worker."]
    end_reason: Annotated[str | None, "Reason of an end without a record."]
    migration_ns: Annotated[int | None, "Time the worker was told to release it."]
    migration_target: Annotated[str | None, "Worker that continues it."]
    migration_reason: Annotated[str | None, "Reason of the migration."]


class RecordRow(Row, frozen=True, kw_only=True, gc=False):
    """A trajectory record that control names, whether it counts or not."""

    trajectory_id: Annotated[str, "Trajectory id."]
    attempt: Annotated[int, Sql("SMALLINT"), "Number of the attempt."]
    incarnation: Annotated[int, "Incarnation of the worker that wrote it."]
    status: Annotated[str, "`bound` (counts), `superseded` or `fenced`."]
    logged_ns: Annotated[int, "Time the worker logged it."]
    control_offset: Annotated[int, "Offset of the report in control."]
    partition: Annotated[Small, "Partition of the record."]
    record_offset: Annotated[int, "Offset of the record."]
    size_bytes: Annotated[Small, "Size of the value, bytes."]
    tokens: Annotated[Small, "Sampled tokens."]
    reward: Annotated[float | None, "Reward; null if invalid."]
    finish: Annotated[str, "Reason sampling ended."]
    sha256: Annotated[str, "SHA-256 of the value, hex."]


class EventRow(Row, frozen=True, kw_only=True, gc=False):
    """A decision, observation or control record. Dispatches, attempts and logged trajectories have
    their own tables. Rows that a dispatch skipped are `row-skipped`."""

    at_ns: Annotated[int, "Time of the entry."]
    round: Annotated[int | None, "Round of a decision or observation; null for control records."]
    kind: Annotated[str, "Kind of the decision, observation or record."]
    subject: Annotated[str, "Worker, group, trajectory, step or role."]
    reason: Annotated[str, "Reason or content."]


class MarkRow(Row, frozen=True, kw_only=True, gc=False):
    """A changed setting, a stop of the run, or a lost or restarted role."""

    at_ns: Annotated[int, "Time of the entry."]
    step: Annotated[Small, "First step with a new setting, else the step in training."]
    kind: Annotated[str, "`setting`, `resumed`, `restarted`, `lost`."]
    subject: Annotated[str, "Configuration key, `run`, or role."]
    before: Annotated[str | None, "Previous value of the setting."]
    after: Annotated[str | None, "New value of the setting."]
    since_ns: Annotated[int | None, "Start of the stop that `resumed` ends."]
    description: Annotated[str, "Description in one line."]


class FailureRow(Row, frozen=True, kw_only=True, gc=False):
    """A `request failed`: an attempt that ended in an error."""

    trajectory_id: Annotated[str, "Trajectory id."]
    attempt: Annotated[int, Sql("SMALLINT"), "Number of the attempt."]
    worker: Annotated[str, "Name of the worker."]
    at_ns: Annotated[int, "Time of the failure."]
    error: Annotated[str, "Class of the error."]
    message: Annotated[str, "First lines of the error."]
    retryable: Annotated[bool, "Whether another attempt is allowed."]


class CallRow(Row, frozen=True, kw_only=True, gc=False):
    """An agent's call to the model. Each statement that names this table reads the records; the
    saved file does not contain it."""

    trajectory_id: Annotated[str, "Trajectory id."]
    call: Annotated[Small, "Number of the call in order of answers, from 0."]
    context: Annotated[Small, "Context that the call continues or opens; 0: the first."]
    api: Annotated[str, "`chat`, `responses`, `messages` or `generate`."]
    caller: Annotated[str | None, "Name of the caller, as the agent gave it."]
    asked_ns: Annotated[int, "Time the call arrived."]
    answered_ns: Annotated[int, "Time its durable answer was sent."]
    idle_ns: Annotated[int, "Time without an open call before it, ns."]
    prompt_tokens: Annotated[Small, "Tokens before the sampled ones."]
    tokens: Annotated[Small, "Sampled tokens."]
    finish: Annotated[str, "Reason sampling ended."]
    occurrence: Annotated[Small, "Earlier calls of the trajectory with the same prompt ids."]
    ignored_settings: Annotated[
        str | None, Sql("JSON"), "Sampling settings of the call that the run ignores."
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    sql: str
    null: bool
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; rows of `live` ones may change."""

    name: str
    row: type[Row]
    live: bool = False

    @property
    def description(self) -> str:
        return " ".join((self.row.__doc__ or "").split())


TABLES: Final = (
    Table(name="runs", row=RunRow, live=True),
    Table(name="steps", row=StepRow),
    Table(name="groups", row=GroupRow, live=True),
    Table(name="trajectories", row=TrajectoryRow, live=True),
    Table(name="attempts", row=AttemptRow, live=True),
    Table(name="records", row=RecordRow),
    Table(name="versions", row=VersionRow),
    Table(name="workers", row=WorkerRow, live=True),
    Table(name="served_versions", row=ServedVersionRow),
    Table(name="batches", row=BatchRow, live=True),
    Table(name="parts", row=PartRow),
    Table(name="events", row=EventRow),
    Table(name="failures", row=FailureRow),
    Table(name="marks", row=MarkRow),
)

CALLS: Final = Table(name="calls", row=CallRow)
"""Read from records on request, not stored."""

TABLE_OF: Final = {table.row: table for table in TABLES}


def columns_of(row: type[Row]) -> list[Column]:
    hints = get_type_hints(row, include_extras=True)
    return [_column(name, hints[name]) for name in row.__struct_fields__]


def _column(name: str, hint: Any) -> Column:
    kind, *notes = get_args(hint)
    plain = [member for member in (get_args(kind) or (kind,)) if member is not NoneType]
    sql = next((note.name for note in notes if isinstance(note, Sql)), None)
    return Column(
        name=name,
        sql=sql or SQL_TYPES[plain[0]],
        null=len(plain) < len(get_args(kind) or (kind,)),
        description=next(note for note in notes if isinstance(note, str)),
    )

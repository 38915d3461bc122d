"""Tables of the catalogue: one Struct per table, one field per column.

Null: it did not happen. Times are ns since 1970: `dispatched_ns`, `placed_ns`, `taken_ns` and
decided ends by the orchestrator's clock, others by the writer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_type_hints

import msgspec

FORM: Final = 11
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
    """The run: one row."""

    run: Annotated[str, "its name"]
    first_ns: Annotated[int, "the first moment that control or decisions name"]
    started_ns: Annotated[int, "`run started`"]
    last_ns: Annotated[int, "the latest moment that control or decisions name"]
    stopped: Annotated[bool, "whether a decision has stopped it"]
    rounds: Annotated[int, "rounds that were read"]
    seed: Annotated[int, "of the run"]
    planner: Annotated[str, "name and form of the planner"]
    package: Annotated[str, "version of dora-pipe that started it"]
    schema_version: Annotated[Small, "of the records"]
    config: Annotated[str, Sql("JSON"), "the resolved configuration as `run started` has it"]
    config_digest: Annotated[str, "sha256 of it"]
    dataset_digest: Annotated[str, "of the training rows"]
    dataset_rows: Annotated[int, "how many"]
    eval_digest: Annotated[str, "of the evaluation rows"]
    eval_rows: Annotated[int, "how many"]
    assets_digest: Annotated[str, "of the model's configuration and tokenizer"]
    lineage_run: Annotated[str | None, "the run its weights came from (`run --from`)"]
    lineage_step: Annotated[int | None, "and the step"]


class WorkerRow(Row, frozen=True, kw_only=True, gc=False):
    """An incarnation of a worker."""

    worker: Annotated[str, "its name"]
    incarnation: Annotated[int, "the offset of its `worker joined`: records call it `epoch`"]
    joined_ns: Annotated[int, "`worker joined`"]
    gone_ns: Annotated[int | None, "when it left or was fenced"]
    departure: Annotated[str | None, "`left` or `fenced`"]
    why: Annotated[str | None, "why it is gone"]
    slots: Annotated[Small, "requests that it runs at the same time"]
    prefetch: Annotated[Small, "requests that it holds ahead"]
    kv_tokens: Annotated[int, "tokens that its KV cache holds"]
    engine: Annotated[str, "kind of the engine"]
    engine_version: Annotated[str, "of the engine"]
    device: Annotated[str, "what it computes on"]
    dtype: Annotated[str, "and in which numbers"]
    reward_digest: Annotated[str, "sha256 of the code of its reward; empty: not known"]
    template_digest: Annotated[str, "sha256 of how messages become tokens; empty: it has none"]
    host: Annotated[str, "machine"]
    pid: Annotated[Small, "process there"]


class HostingRow(Row, frozen=True, kw_only=True, gc=False):
    """A worker has loaded a version: it hosts it until it loads the next, or drops it. Version -1:
    it sleeps from then on."""

    worker: Annotated[str, "its name"]
    incarnation: Annotated[int, "of the worker"]
    version: Annotated[Small, "the policy version"]
    assigned_ns: Annotated[int | None, "when it was decided that it shall"]
    ready_ns: Annotated[int, "`worker ready`"]
    load_ms: Annotated[float, "how long loading took"]


class FallbackRow(Row, frozen=True, kw_only=True, gc=False):
    """A file of a version was lost or damaged where a worker had it from, and another was taken."""

    worker: Annotated[str, "its name, or `trainer`"]
    incarnation: Annotated[int, "of the worker or trainer"]
    version: Annotated[Small, "the policy version that it loaded"]
    at_ns: Annotated[int, "`worker ready`, or the commit that says it"]
    why: Annotated[str, "what was wrong with which file: its name and its place"]
    taken: Annotated[str, "name of the file that was taken in its place"]
    bytes: Annotated[int, "fetched in its place; 0: all of it was on the machine"]


class VersionRow(Row, frozen=True, kw_only=True, gc=False):
    """A published policy version."""

    version: Annotated[Small, "number of committed steps; 0: the initial weights"]
    digest: Annotated[str, "weights digest, hex"]
    published_ns: Annotated[int, "`run started` or the commit"]


class BatchRow(Row, frozen=True, kw_only=True, gc=False):
    """A batch decision."""

    step: Annotated[Small, "the step it is for"]
    attempt: Annotated[Small, "which attempt at its batch"]
    round: Annotated[int, "of the decision"]
    free_ns: Annotated[int | None, "when the trainer was free for it; null: not known"]
    taken_ns: Annotated[int, "when it was decided"]
    ended_ns: Annotated[int | None, "when it was committed or came to nothing"]
    groups: Annotated[Small, "how many it has"]
    parts: Annotated[Small, "in how many parts it was taken"]
    last: Annotated[str | None, "the trajectory of it that was logged last"]
    reason: Annotated[str, "why it was taken then"]
    outcome: Annotated[
        str | None, "`committed`, `refused`, `overtaken` by a newer one, `failed`; null: in force"
    ]
    why: Annotated[str, "why it came to nothing"]


class PartRow(Row, frozen=True, kw_only=True, gc=False):
    """A part of the batch of a committed step, where that was taken in several."""

    step: Annotated[Small, "the step"]
    part: Annotated[Small, "from 0; the last one was taken with the batch"]
    free_ns: Annotated[int, "when the trainer was free for it"]
    taken_ns: Annotated[int, "when it was decided"]
    begun_ns: Annotated[int, "the later of the two"]
    waited_s: Annotated[float, "the trainer was free and it was not there"]
    seconds: Annotated[float | None, "computing it ahead of the batch; null: it was with that"]
    last: Annotated[str | None, "the trajectory of it that was logged last"]
    reason: Annotated[str, "why it was taken then"]
    groups: Annotated[Small, "how many it has"]
    trajectories: Annotated[Small, "in these"]
    tokens: Annotated[int, "sampled ones of these"]


class StepRow(Row, frozen=True, kw_only=True, gc=False):
    """A committed training step."""

    step: Annotated[Small, "it takes version `step` to `step + 1`"]
    attempt: Annotated[Small, "of the batch that was trained"]
    control_offset: Annotated[int, "where the commit lies in control"]
    free_ns: Annotated[int | None, "when the trainer was free for it; null: not known"]
    taken_ns: Annotated[int, "when its batch was decided"]
    committed_ns: Annotated[int, "the commit"]
    seconds: Annotated[
        float | None, "from `free_ns` to the commit, without the time the run was stopped"
    ]
    stopped_s: Annotated[float, "between these two, the run was stopped"]
    waited_s: Annotated[float, "of these, the trainer was free and had no batch, nor a part"]
    ahead_s: Annotated[float, "of these, it computed parts ahead of the batch"]
    beside_s: Annotated[float, "before `free_ns`: on a part, beside the version before"]
    compute_s: Annotated[float, "of these, it computed"]
    waited_for: Annotated[str | None, "the trajectory that came last, where it waited"]
    waited_worker: Annotated[str | None, "who logged that one"]
    waited_version: Annotated[int | None, Sql("INTEGER"), "and under which version"]
    reason: Annotated[str, "why its batch was taken then"]
    groups: Annotated[Small, "in its batch"]
    trajectories: Annotated[Small, "in its batch"]
    valid: Annotated[Small, "of these, with a reward"]
    reward: Annotated[float | None, "mean reward of the valid ones"]
    reward_raw: Annotated[float | None, "the same, where one without a reward counts as 0"]
    reward_low: Annotated[float | None, "first quartile of the groups' mean rewards"]
    reward_high: Annotated[float | None, "third quartile of them"]
    tokens: Annotated[int, "sampled ones of the batch"]
    tokens_p10: Annotated[
        int | None, Sql("INTEGER"), "a tenth of its trajectories have at most so many"
    ]
    tokens_p50: Annotated[int | None, Sql("INTEGER"), "half of them"]
    tokens_p90: Annotated[int | None, Sql("INTEGER"), "nine tenths of them"]
    tokens_max: Annotated[int | None, Sql("INTEGER"), "the longest"]
    staleness_min: Annotated[Small, "of its groups"]
    staleness_mean: Annotated[float, "of its groups"]
    staleness_max: Annotated[Small, "of its groups"]
    bound: Annotated[Small, "the largest staleness that one of its groups was allowed"]
    late: Annotated[Small, "groups behind their deadline: C3 is broken where there is one"]
    loss: Annotated[float | None, "of the step"]
    grad_norm: Annotated[float | None, "of the step"]
    reward_parts: Annotated[
        str | None, Sql("JSON"), 'mean of every part of its rewards, by task (`""`: no name)'
    ]
    figures: Annotated[str, Sql("JSON"), "all figures of the commit"]
    settings: Annotated[str, Sql("JSON"), "logged configuration keys that were in force"]
    digest_before: Annotated[str, "weights digest before it"]
    digest_after: Annotated[str, "and after it"]
    contributions: Annotated[str, "sha256 of the file that says what each trajectory contributed"]
    adopted: Annotated[bool, "the weights before it were adopted, not replayed"]


class GroupRow(Row, frozen=True, kw_only=True, gc=False):
    """A dispatched group of siblings."""

    group_id: Annotated[str, "`g...` for training, `e...` for evaluation"]
    purpose: Annotated[str, "`train` or `eval`"]
    task: Annotated[str, "name of its task; empty where that has none"]
    evaluation: Annotated[str, "name of its evaluation, of which it is a row; empty: none"]
    ordinal: Annotated[int, "place among the dispatches of its purpose"]
    version: Annotated[Small, "the policy version that samples it"]
    deadline: Annotated[Small, "the last step that may train it; -1 for evaluation"]
    row: Annotated[int, "of the data set"]
    data_epoch: Annotated[Small, "pass over the data"]
    size: Annotated[Small, "siblings that it is complete with"]
    spare: Annotated[Small, "siblings beside those: the first `size` valid ones count"]
    round: Annotated[int, "that dispatched it"]
    reason: Annotated[str, "why it was dispatched then"]
    dispatched_ns: Annotated[int, "when"]
    complete_ns: Annotated[int | None, "when the last sibling was logged that counts"]
    taken_ns: Annotated[int | None, "when a batch, or a part of it, took it"]
    ended_ns: Annotated[int | None, "when it had its fate"]
    fate: Annotated[str, "`open`, `trained`, `filtered`, `failed`, `cancelled`, `evaluated`"]
    why: Annotated[str, "of its fate"]
    step: Annotated[int | None, Sql("INTEGER"), "that trains it: its batch, or its commit"]
    part: Annotated[
        int | None, Sql("SMALLINT"), "of that batch, from 0, where it was taken in several"
    ]
    staleness: Annotated[int | None, Sql("INTEGER"), "step less version, where it was trained"]
    results: Annotated[Small, "siblings whose record counts"]
    valid: Annotated[Small, "of these, with a reward"]
    reward: Annotated[float | None, "mean of these rewards"]
    tokens: Annotated[int, "sampled ones of the records that count"]


class TrajectoryRow(Row, frozen=True, kw_only=True, gc=False):
    """One sibling of a dispatched group, with the record that counts for it."""

    trajectory_id: Annotated[str, "its group's id and its place among the siblings"]
    group_id: Annotated[str, "its group"]
    sibling: Annotated[int, Sql("SMALLINT"), "0 to size + spare - 1"]
    own_fate: Annotated[
        str | None,
        "`surplus` or `expired`: its group did not wait for it; null: it has its group's",
    ]
    attempts: Annotated[int, Sql("SMALLINT"), "how often it was placed"]
    placed_ns: Annotated[int | None, "first placement"]
    worker: Annotated[str | None, "who logged the record that counts, or has it now"]
    incarnation: Annotated[int | None, "of that worker"]
    attempt: Annotated[int | None, Sql("SMALLINT"), "of that record, or the present one"]
    logged_ns: Annotated[int | None, "when its record was logged"]
    partition: Annotated[int | None, Sql("INTEGER"), "where its record lies"]
    record_offset: Annotated[int | None, "where in the partition"]
    tokens: Annotated[int | None, Sql("INTEGER"), "sampled ones"]
    reward: Annotated[float | None, "null where there is no record, or no valid reward"]
    group_parts: Annotated[
        str | None, "scores of its group by name, as JSON, where its siblings were scored together"
    ]
    finish: Annotated[str | None, "`stop`, `length`, `environment`, `error`"]
    error_class: Annotated[str | None, "of why its reward is not valid: `TimedOut`, `ValueError`"]
    error: Annotated[str | None, "why its reward is not valid: class, place and message"]
    reward_answer: Annotated[str | None, "what its reward read as its answer"]
    reward_parts: Annotated[str | None, Sql("JSON"), "what its reward is made of, by name"]
    contexts: Annotated[
        int | None, Sql("INTEGER"), "that its record has; more than 1 where it branches"
    ]
    calls: Annotated[int | None, Sql("INTEGER"), "of an agent to the model, that its record has"]


class AttemptRow(Row, frozen=True, kw_only=True, gc=False):
    """One attempt at a trajectory: from its placement on a worker until that lets go of it."""

    trajectory_id: Annotated[str, "what is sampled"]
    attempt: Annotated[int, Sql("SMALLINT"), "counted from 1"]
    worker: Annotated[str, "where"]
    incarnation: Annotated[int, "of that worker"]
    placed_ns: Annotated[int, "the decision"]
    ended_ns: Annotated[int | None, "null while it goes on"]
    outcome: Annotated[
        str | None, "`logged`, `moved`, `failed`, `cancelled`; `left` or `fenced` as its worker"
    ]
    resumed: Annotated[Small, "sampled tokens that it went on from; 0: from the prompt"]
    reason: Annotated[str | None, "why it was placed there"]
    why: Annotated[str | None, "why it ended, where it did not end with a record"]
    move_ns: Annotated[int | None, "when the worker was asked to let go of it"]
    move_to: Annotated[str | None, "so that this worker goes on with it"]
    move_why: Annotated[str | None, "and why"]


class RecordRow(Row, frozen=True, kw_only=True, gc=False):
    """A record of the trajectories topic that control has named, whether it counts or not."""

    trajectory_id: Annotated[str, "of which trajectory"]
    attempt: Annotated[int, Sql("SMALLINT"), "of which attempt"]
    incarnation: Annotated[int, "of the worker that wrote it"]
    standing: Annotated[str, "`bound`: it counts; `superseded`; `fenced`"]
    logged_ns: Annotated[int, "when its worker said that it lies in the log"]
    control_offset: Annotated[int, "where in control it said so"]
    partition: Annotated[Small, "where it lies"]
    record_offset: Annotated[int, "where in the partition"]
    size_bytes: Annotated[Small, "of its value"]
    tokens: Annotated[Small, "sampled ones"]
    reward: Annotated[float | None, "null where it is not valid"]
    finish: Annotated[str, "why it ended"]
    sha256: Annotated[str, "of its value, hex"]


class EventRow(Row, frozen=True, kw_only=True, gc=False):
    """What was decided, observed or told, except dispatches, placements and logged trajectories,
    which have tables of their own; and rows that dispatches skipped (`row-skipped`)."""

    at_ns: Annotated[int, "when"]
    round: Annotated[int | None, "of decisions and observations; null for facts"]
    kind: Annotated[str, "tag of the decision, observation or fact"]
    subject: Annotated[str, "the worker, group, trajectory, step or role it is about"]
    reason: Annotated[str, "why, or what it says"]


class MarkRow(Row, frozen=True, kw_only=True, gc=False):
    """A setting that changed in the run, a stop, a role that was lost or came back."""

    at_ns: Annotated[int, "when"]
    step: Annotated[Small, "a setting is in force from it on; else the step that was open then"]
    kind: Annotated[str, "`setting`, `resumed`, `restarted`, `lost`"]
    subject: Annotated[str, "the key, `run`, or the role"]
    before: Annotated[str | None, "value of the setting before"]
    after: Annotated[str | None, "and after"]
    since_ns: Annotated[int | None, "of `resumed`: the run was stopped from then on"]
    words: Annotated[str, "what happened"]


class FailureRow(Row, frozen=True, kw_only=True, gc=False):
    """A `request failed`: an attempt that ended in an error."""

    trajectory_id: Annotated[str, "of which trajectory"]
    attempt: Annotated[int, Sql("SMALLINT"), "of which attempt"]
    worker: Annotated[str, "where"]
    at_ns: Annotated[int, "when"]
    error: Annotated[str, "class of the error"]
    message: Annotated[str, "its first lines"]
    retryable: Annotated[bool, "whether it may be placed again"]


class CallRow(Row, frozen=True, kw_only=True, gc=False):
    """A call of an agent to the model, of a record that counts. It is read from the records for
    each statement that names it: the file beside the run does not have this table."""

    trajectory_id: Annotated[str, "in which it was made"]
    call: Annotated[Small, "its place among those of the trajectory, as they were answered, from 0"]
    context: Annotated[Small, "the context that it goes on with or opens; 0: the first"]
    api: Annotated[str, "`chat`, `responses`, `messages` or `generate`"]
    caller: Annotated[str | None, "what the agent called itself"]
    asked_ns: Annotated[int, "when it came"]
    answered_ns: Annotated[int, "when its answer was durable in the log, and left"]
    idle_ns: Annotated[
        int, "ns before it in which no call was open since the one before it, or the placement"
    ]
    prompt_tokens: Annotated[Small, "of the sequence before what was sampled for it"]
    tokens: Annotated[Small, "that were sampled for it"]
    finish: Annotated[str, "why its sampling ended"]
    occurrence: Annotated[Small, "calls of the trajectory that had these very prompt ids before"]
    asked: Annotated[
        str | None, Sql("JSON"), "settings that it asked for and that the run does not follow"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    sql: str
    null: bool
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; rows of `live` ones may change."""

    name: str
    row: type[Row]
    live: bool = False

    @property
    def words(self) -> str:
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
    Table(name="hostings", row=HostingRow),
    Table(name="fallbacks", row=FallbackRow),
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
    """Return the columns from field annotations."""
    hints = get_type_hints(row, include_extras=True)
    return [_column(name, hints[name]) for name in row.__struct_fields__]


def _column(name: str, hint: Any) -> Column:
    kind, *notes = get_args(hint)
    plain = [one for one in (get_args(kind) or (kind,)) if one is not NoneType]
    sql = next((one.name for one in notes if isinstance(one, Sql)), None)
    return Column(
        name=name,
        sql=sql or SQL_TYPES[plain[0]],
        null=len(plain) < len(get_args(kind) or (kind,)),
        words=next(one for one in notes if isinstance(one, str)),
    )

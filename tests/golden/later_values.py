"""Values of what records have gained; their bytes are golden like those of `values`."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from dora_pipe.schemas import control, metrics, rounds
from dora_pipe.schemas.policy import Blob
from tests.golden.arrow_values import PLAIN_TRAJECTORY
from tests.golden.values import AT_NS, CONTROL, COST, DIGEST, GROUP, ROUND, SHA256

ROUND_HALT = rounds.Round(
    ordinal=3,
    incarnation=0,
    now_ns=3,
    control_next=2,
    decisions=(
        rounds.Halt(
            reason="all of the last 8 groups that ended have failed",
            error="KeyError: 'answr'",
            trajectory=f"{GROUP}-001",
        ),
    ),
)
"""Too many groups fail."""

ROUND_EARLY_STOP = rounds.Round(
    ordinal=3,
    incarnation=0,
    now_ns=3,
    control_next=2,
    decisions=(
        rounds.EarlyStop(
            reason="evaluation hard of the last 3 versions was not better than that of version 4,"
            " 0.5",
            evaluation="hard",
            best=4,
        ),
    ),
)
"""The evaluation that is watched gets no better."""

LOGGED_INVALID = control.TrajectoriesLogged(
    at_ns=AT_NS,
    worker="w0",
    incarnation=7,
    version=3,
    digest=DIGEST,
    trajectories=(
        control.LoggedEntry(
            trajectory=f"{GROUP}-001",
            attempt=1,
            partition=2,
            offset=91,
            sha256=SHA256,
            bytes=1502,
            tokens=24,
            reward=None,
            finish="stop",
            error="KeyError: 'answr'",
        ),
    ),
)
"""A trajectory whose reward raised."""

LOGGED_SAID = msgspec.structs.replace(
    LOGGED_INVALID,
    trajectories=(
        msgspec.structs.replace(
            LOGGED_INVALID.trajectories[0],
            reward=1.05,
            error="",
            answer="42",
            parts={"math": 1.0, "math.parsed": 1.0, "brevity": 0.5},
        ),
    ),
)
"""A reward of several parts, which read an answer."""

LOGGED_BRANCHED = msgspec.structs.replace(
    LOGGED_INVALID,
    trajectories=(
        msgspec.structs.replace(
            LOGGED_INVALID.trajectories[0], reward=1.0, error="", contexts=4, calls=5
        ),
    ),
)
"""An agent's trajectory."""

STATUS_SINCE = metrics.WorkerStatus(
    at_ns=AT_NS,
    cost=COST,
    worker="w0",
    incarnation=7,
    version=3,
    active=1,
    waiting=0,
    kv_used_tokens=2048,
    tokens_total=99_999,
    progress={f"{GROUP}-002": control.Resume(tokens=256, partition=2, offset=18)},
    since=True,
    ended=(f"{GROUP}-001",),
)
"""A status that says of the progress what has changed."""

STATUS_OFF_ENGINE = metrics.WorkerStatus(
    at_ns=AT_NS,
    cost=COST,
    worker="w0",
    incarnation=7,
    version=3,
    active=64,
    waiting=3,
    kv_used_tokens=2048,
    tokens_total=99_999,
    progress={},
    off_engine=61,
    in_environment=40,
    being_scored=25,
)
"""A worker most of whose requests wait for tools and judges."""

STATUS_SESSIONS = msgspec.structs.replace(
    STATUS_OFF_ENGINE,
    off_engine=230,
    in_environment=0,
    being_scored=1,
    with_agent=229,
    calls_open=65,
    call_since_ns=AT_NS - 1_500_000_000,
)
"""A worker of sessions, most of whose agents think."""

STATUS_FAILING = msgspec.structs.replace(
    STATUS_OFF_ENGINE,
    failing=(
        metrics.FailingServer(
            task="games",
            url="tcp://games-1:7000",
            failures=3,
            since_ns=AT_NS - 12_000_000_000,
            suspended=True,
            reason="the connection to tcp://games-1:7000 ended",
        ),
        metrics.FailingServer(
            task="shell", failures=1, since_ns=AT_NS, reason="8 calls in a row failed there"
        ),
    ),
)
"""A worker one of whose servers is left alone, and whose own processes are tried again."""

STATUS_TRIED = msgspec.structs.replace(
    STATUS_FAILING,
    failing=tuple(msgspec.structs.replace(one, tries=4) for one in STATUS_FAILING.failing),
)
"""It says how often they were tried."""

STATUS_CALLS = msgspec.structs.replace(
    STATUS_SESSIONS,
    calls_oldest=(metrics.UnansweredCall(f"{GROUP}-001", 4, AT_NS - 1_500_000_000, "slots"),),
)
"""It names the oldest calls that have no answer."""

STATUS_QUEUE = msgspec.structs.replace(STATUS_CALLS, calls_before=(12,))
"""And says which place they have in its queue."""

STATUS_KEEPING = msgspec.structs.replace(
    STATUS_SINCE, prompt_tokens_computed=1200, prompt_tokens_reused=3400
)
"""A worker whose engine keeps prefixes."""

ROUND_OFF_ENGINE = rounds.Round(
    ordinal=3,
    incarnation=0,
    now_ns=3,
    control_next=2,
    observations=(rounds.OffEngine(worker="w0", incarnation=7, requests=61),),
)
"""That it is so is observed."""

STARTED_SEVERAL = msgspec.structs.replace(
    next(one for one in CONTROL if isinstance(one, control.RunStarted)),
    datasets={
        "train/add": control.DataSet(digest=DIGEST, rows=1000),
        "train/calc": control.DataSet(digest=SHA256, rows=7),
        "eval/hard": control.DataSet(digest=SHA256, rows=64),
    },
)
"""Two tasks and an evaluation with a name."""

ROUND_NAMED = rounds.Round(
    ordinal=4,
    incarnation=0,
    now_ns=4,
    control_next=2,
    decisions=tuple(
        msgspec.structs.replace(
            one,
            spec=msgspec.structs.replace(one.spec, purpose="eval", task="add", evaluation="hard"),
        )
        for one in ROUND.decisions
        if isinstance(one, rounds.Dispatch | rounds.Schedule)
    ),
)
"""A row of an evaluation with a name, of a task that has one too."""

NAMED_TRAJECTORY = replace(
    PLAIN_TRAJECTORY,
    meta=msgspec.structs.replace(PLAIN_TRAJECTORY.meta, task="add", evaluation="hard"),
)
"""Of an evaluation with a name."""

_STARTED = next(one for one in CONTROL if isinstance(one, control.RunStarted))

STARTED_TOGETHER = msgspec.structs.replace(_STARTED, scored_together=("train", "eval"))
"""The trajectories of every group are scored together."""

STARTED_WITH_OPTIMIZER = msgspec.structs.replace(
    _STARTED,
    lineage=control.Lineage(
        run="before", step=12, digest=DIGEST, optimizer=Blob(sha256=SHA256, bytes=1024)
    ),
)
"""A run that begins with another one's version and its optimizer's state."""

SCORED = control.GroupScored(
    at_ns=AT_NS,
    worker="w0",
    incarnation=7,
    group=GROUP,
    attempt=2,
    samples=(
        control.ScoredSample(trajectory=f"{GROUP}-000", reward=1.25, parts={"rank": 0.5}),
        control.ScoredSample(trajectory=f"{GROUP}-001", reward=-0.1),
    ),
)
"""What the trajectories of a group are worth beside each other."""

NOT_SCORED = control.GroupScored(
    at_ns=AT_NS,
    worker="w0",
    incarnation=7,
    group=GROUP,
    attempt=1,
    error="Retry: the judge is busy",
    retryable=True,
)
"""An attempt that came to nothing."""

_TAKEN = next(one for one in ROUND.decisions if isinstance(one, rounds.TakeBatch))

ROUND_SCORED = rounds.Round(
    ordinal=5,
    incarnation=0,
    now_ns=5,
    control_next=2,
    decisions=(
        rounds.ScoreGroup(
            reason="all 2 trajectories have ended; w0 scores them together",
            spec=next(one.spec for one in ROUND.decisions if isinstance(one, rounds.Dispatch)),
            worker="w0",
            incarnation=7,
            attempt=2,
            trajectories=_TAKEN.groups[0].trajectories,
        ),
        msgspec.structs.replace(
            _TAKEN,
            groups=(
                msgspec.structs.replace(_TAKEN.groups[0], rewards={f"{GROUP}-000": 1.25}),
                *_TAKEN.groups[1:],
            ),
        ),
    ),
)
"""A group is scored, and taken with what it was scored."""

ANSWERED_TRAJECTORY = replace(
    PLAIN_TRAJECTORY, meta=msgspec.structs.replace(PLAIN_TRAJECTORY.meta, reward_answer="42")
)
"""Its reward says which answer it read."""

AGENTS_TRAJECTORY = replace(
    PLAIN_TRAJECTORY,
    meta=msgspec.structs.replace(PLAIN_TRAJECTORY.meta, rewarded_by="agent", agent_answer="42"),
)
"""Its agent gave answer and reward."""

JOINED_CHAT = msgspec.structs.replace(
    next(one for one in CONTROL if isinstance(one, control.WorkerJoined)), template_digest=SHA256
)
"""A worker of a run whose prompts are messages."""

JOINED_PLAYS = msgspec.structs.replace(
    JOINED_CHAT, packages={"gymnasium": "1.4.0 53b537c816b0ed52"}
)
"""A worker whose task is an environment of another package."""

JOINED_COLOCATED = msgspec.structs.replace(JOINED_CHAT, colocated=True)
"""A worker that sleeps while a step is computed."""

JOINED_TASKS = msgspec.structs.replace(
    JOINED_CHAT, reward_digests={"train/sums": DIGEST, "train/words": "b" * 64}
)
"""A worker of a run with several tasks."""

ROUND_SKIPPED = msgspec.structs.replace(
    ROUND,
    decisions=tuple(
        msgspec.structs.replace(one, skipped=(17, 31))
        for one in ROUND.decisions
        if isinstance(one, rounds.Dispatch)
    ),
)
"""A dispatch that two solved rows were skipped for."""

ORCHESTRATOR_DRAWS = msgspec.structs.replace(
    next(one for one in CONTROL if isinstance(one, control.RoleStarted)),
    samplers={"curriculum:weights": SHA256},
)
"""An orchestrator that draws rows by a user's weights."""

ROUND_IMPATIENT = rounds.Round(
    ordinal=6,
    incarnation=0,
    now_ns=6,
    control_next=2,
    observations=(rounds.GroupExpired(group=GROUP),),
    decisions=(
        rounds.EndSamples(
            reason="its group was open for too long; 2 of 4 are valid",
            group=GROUP,
            samples=(1, 3),
            outcome="expired",
        ),
        *(
            msgspec.structs.replace(one, spec=msgspec.structs.replace(one.spec, redundancy=2))
            for one in ROUND.decisions
            if isinstance(one, rounds.Dispatch)
        ),
    ),
)
"""A group waits no longer for two of its trajectories; another one has two to spare."""


ROUND_PARTS = rounds.Round(
    ordinal=3,
    incarnation=0,
    now_ns=3,
    control_next=2,
    decisions=(
        rounds.TakePart(
            reason="8 groups finished; the batch is not whole yet",
            step=4,
            attempt=1,
            part=0,
            groups=_TAKEN.groups[:1],
            settings={"trainer.learning_rate": 3e-4},
        ),
        msgspec.structs.replace(_TAKEN, attempt=1, parts=(1,)),
    ),
)
"""A batch that is taken in parts."""

ROUND_IN_FLIGHT = rounds.Round(
    ordinal=3,
    incarnation=0,
    now_ns=3,
    control_next=2,
    decisions=(msgspec.structs.replace(_TAKEN, in_flight=2.25),),
)
"""A batch that says how many batches are in flight from now on."""

COMMITTED_PARTS = msgspec.structs.replace(
    next(one for one in CONTROL if isinstance(one, control.StepCommitted)),
    parts=(1,),
    early_s=(0.75,),
)
"""Its commit."""

COMMITTED_OVERLAP = msgspec.structs.replace(COMMITTED_PARTS, early_s=(0.0,), overlap_s=1.25)
"""One whose part was computed while the version before was published."""

COMMITTED_DELTA = msgspec.structs.replace(
    next(one for one in CONTROL if isinstance(one, control.StepCommitted)),
    metrics={"loss": -0.25, "changed_share": 0.0109375, "delta_share": 0.0140625},
    full=False,
    delta=Blob(sha256="9" * 64, bytes=4096),
)
"""A commit whose version is stored as a delta alone."""

"""Records that a worker logs for a request, built from its state."""

from __future__ import annotations

from dora_pipe.core.errors import one_line
from dora_pipe.core.pure.machine import Now
from dora_pipe.producers.worker.request import Phase, RequestState, WorkerSetup
from dora_pipe.schemas.contexts import Call
from dora_pipe.schemas.control import (
    ERROR_CHARACTERS_MAX,
    LoggedEntry,
    RequestReleased,
    parts_in_control,
)
from dora_pipe.schemas.trajectory import (
    Meta,
    Progress,
    Sampler,
    Times,
    Trajectory,
    TurnProgress,
)
from dora_pipe.schemas.wire import SCHEMA_VERSION


def trajectory_of(request: RequestState, setup: WorkerSetup) -> Trajectory:
    scheduled, spec, sequence = request.place, request.place.spec, request.sequence
    return Trajectory(
        trajectory=scheduled.trajectory,
        version=spec.version,
        digest=spec.digest,
        token_ids=sequence.token_ids,
        logprobs=sequence.logprobs,
        sampler_logprobs=sequence.sampler_logprobs,
        loss_mask=sequence.loss_mask,
        reward=request.score.reward,
        segments=sequence.segments,
        routed_experts=sequence.routes.between(0, len(sequence)),
        meta=_meta_of(request, setup),
    )


def _meta_of(request: RequestState, setup: WorkerSetup) -> Meta:
    scheduled, spec, sequence = request.place, request.place.spec, request.sequence
    session = request.session
    return Meta(
        run=setup.topics.run,
        schema_version=SCHEMA_VERSION,
        group=spec.group,
        group_size=spec.size,
        sample=scheduled.sample,
        attempt=scheduled.attempt,
        purpose=spec.purpose,
        deadline=spec.deadline,
        dataset_digest=spec.dataset_digest,
        index=spec.index,
        data_epoch=spec.data_epoch,
        seed=request.seed,
        task=spec.task,
        evaluation=spec.evaluation,
        prompt_tokens=sequence.prompt_tokens,
        worker=setup.worker,
        incarnation=setup.incarnation,
        finish=request.finish,
        times=Times(
            scheduled=request.placed_ns,
            started=request.started_ns,
            first_token=request.first_token_ns,
            finished=request.finished_ns,
            rewarded=request.score.at_ns,
        ),
        reward_raw=request.score.raw,
        reward_parts=request.score.parts,
        reward_error=request.score.error,
        reward_answer=request.score.answer,
        rewarded_by=request.score.by,
        agent_answer=request.score.agent_answer,
        error=request.error,
        prefills=tuple(sequence.prefills),
        migrations=sequence.moves,
        contexts=() if session is None else session.contexts,
        calls=() if session is None else session.made,
        weights=tuple(
            Sampler(version=version, digest=request.weights[version])
            for version in sequence.versions
            if version != spec.version
        ),
    )


def progress_of(request: RequestState, setup: WorkerSetup) -> Progress:
    """Return the next record of a request."""
    scheduled, sequence, version = request.place, request.sequence, request.served.version
    start, segments = sequence.part(
        request.chain.end, worker=setup.worker, incarnation=setup.incarnation, version=version
    )
    end, version = start + segments[-1].end, segments[-1].version
    finish = request.turn.finish if end == len(sequence) else None
    assert request.first_token_ns is not None
    return Progress(
        trajectory=scheduled.trajectory,
        attempt=scheduled.attempt,
        version=version,
        digest=request.weights[version],
        worker=setup.worker,
        incarnation=setup.incarnation,
        start=start,
        token_ids=sequence.token_ids[start:end],
        logprobs=sequence.logprobs[start:end],
        sampler_logprobs=sequence.sampler_logprobs[start:end],
        loss_mask=sequence.loss_mask[start:end],
        segments=segments,
        prefills=tuple(length for length in sequence.prefills if length < end),
        previous=request.chain.resume.offset if request.chain.resume else -1,
        started_ns=request.first_token_ns,
        finish="stop" if sequence.answered(end) else finish or "",
        routed_experts=sequence.routes.between(start, end),
    )


def turn_progress_of(request: RequestState, call: RequestState, setup: WorkerSetup) -> TurnProgress:
    session, mine, sequence = request.session, call.call, call.sequence
    assert session is not None and mine is not None and call.started_ns is not None
    prompt, end = sequence.prompt_tokens, len(sequence)
    token_ids, logprobs, sampler_logprobs = sequence.sampled_lists()
    call_place = session.tree.place(sequence.token_ids[:prompt])
    return TurnProgress(
        trajectory=request.place.trajectory,
        attempt=request.place.attempt,
        version=request.place.spec.version,
        digest=request.place.spec.digest,
        worker=setup.worker,
        incarnation=setup.incarnation,
        turn=len(session.tree.turns),
        **call_place._asdict(),
        token_ids=token_ids,
        logprobs=logprobs,
        sampler_logprobs=sampler_logprobs,
        prefills=tuple(sequence.prefills),
        previous=request.chain.resume.offset if request.chain.resume else -1,
        started_ns=call.started_ns,
        ended_ns=mine.ended_ns,
        routed_experts=sequence.routes.between(prompt - len(call_place.given_ids), end),
        call=Call(
            start=prompt,
            end=end,
            seed=call.seed,
            occurrence=mine.name.occurrence,
            finish=mine.finish,
            asked_ns=mine.asked_ns,
            answered_ns=mine.ended_ns,
            api=mine.api,
            caller=mine.caller,
            ignored_settings=mine.asked,
            stop=mine.stop,
            stop_ids=mine.stop_ids,
        ),
    )


def logged_of(request: RequestState, *, offset: int) -> LoggedEntry:
    return LoggedEntry(
        trajectory=request.place.trajectory,
        attempt=request.place.attempt,
        partition=request.place.spec.partition,
        offset=offset,
        sha256=request.sha256,
        bytes=request.value_bytes,
        tokens=request.sequence.sampled_tokens,
        finish=request.finish,
        reward=request.score.reward,
        error=one_line(request.score.error or "", ERROR_CHARACTERS_MAX),
        tool_error=one_line(request.tool_error, ERROR_CHARACTERS_MAX),
        answer=request.score.answer,
        parts=parts_in_control(request.score.parts),
        contexts=1 if request.session is None else 1 + len(request.session.contexts),
        calls=0 if request.session is None else len(request.session.made),
    )


def released_of(request: RequestState, setup: WorkerSetup, now: Now) -> RequestReleased:
    sampled = not request.episode or request.sequence.in_stay
    released = request.phase is Phase.RELEASING and sampled
    return RequestReleased(
        at_ns=now.wall_ns,
        worker=setup.worker,
        incarnation=setup.incarnation,
        trajectory=request.place.trajectory,
        attempt=request.place.attempt,
        resume=request.chain.resume,
        kv=request.cache.blob if request.chain.resume is not None else None,
        left_ns=now.wall_ns - (now.mono_ns - request.since_ns) if released else 0,
    )

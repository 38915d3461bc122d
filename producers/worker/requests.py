"""Transitions of a request in a worker.

    place -> PROMPTING -> (RESUMING) -> WAITING -> RUNNING -> REWARDING -> LOGGING
    several turns: RUNNING -> ENVIRONMENT -> WAITING -> RUNNING -> ... (see `episodes`)
    the worker leaves: RUNNING -> LEAVING (its last progress record)
    it came with a KV cache: RESUMING -> FETCHING -> WAITING
    it moves: RUNNING -> EXPORTING -> RELEASING
    between two turns: ENVIRONMENT or WAITING -> RELEASING (it moves) or LEAVING
    of an agent: see `sessions`

Methods follow this order. A method that needs a port ends with an effect; `transitions`
maps its answer to the next method.

Rules:

1. An attempt publishes at most one trajectory. After the reward, cancellation is too late.
2. Progress records form a chain, so at most one is open. `Resume` has the offset of the last
   acknowledged one.
3. A request in ENVIRONMENT has no slot; each turn is a new engine request. Requests with several
   turns move only if their environment is replayable.
4. A lost KV cache costs a prefill; the tokens stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

from dora_pipe.core.pure.machine import Now, Publish, Published
from dora_pipe.core.pure.records import Append
from dora_pipe.producers.engines.engine import RequestFinished, TokensSampled
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    EpisodeLost,
    Forget,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    SampledTurns,
    TaskFailed,
)
from dora_pipe.producers.worker.effects import (
    EngineAdd,
    EngineExport,
    EngineExported,
    EngineStarted,
    FetchKv,
    FetchProgress,
    KvFetched,
    KvPut,
    ProgressFetched,
    PutKv,
)
from dora_pipe.producers.worker.kv_handover import label_of
from dora_pipe.producers.worker.request import (
    ANY_VERSION,
    GENERATING,
    MOVING,
    NOTHING,
    WAITING_PHASES,
    Phase,
    RequestState,
    Served,
    WorkerSetup,
    engine_request_of,
    key_of,
)
from dora_pipe.producers.worker.request_records import logged_of, released_of, trajectory_of
from dora_pipe.producers.worker.request_table import RequestTable
from dora_pipe.producers.worker.sequence import TokenSequence, chain_error, sequence_of
from dora_pipe.schemas.control import FinishReason, Resume
from dora_pipe.schemas.headers import header_pairs
from dora_pipe.schemas.rounds import ScheduledRequest
from dora_pipe.schemas.trajectory import Headers, Trajectory
from dora_pipe.schemas.trajectory_codec import encode_trajectory

EMIT_EVERY_TOKENS: Final = 32
"""Report interval in tokens; unreported tokens are lost if the worker stops."""

VALUE_BYTES_MAX: Final = 192 * 1024 * 1024
"""Limit of readers; values above the topic's limit are stored as blobs."""

TRAJECTORY_TAG: Final = "t:"


class Requests(RequestTable):
    def __init__(self, setup: WorkerSetup, codec: AbstractContextManager[object]) -> None:
        super().__init__(setup, codec)
        self.served = NOTHING
        self.tokens_total = 0
        self.abandoned_progress: dict[str, Resume] = {}

    # Placed: PROMPTING, RESUMING, FETCHING

    def place(self, scheduled: ScheduledRequest, now: Now) -> None:
        """Take a request; free slots do not wait for its prompt."""
        request = self.new_state(scheduled, now)
        if request is None:
            return
        self.insert(request)
        spec = scheduled.spec
        self.ask(
            PromptCall(
                request=request.key, split=spec.purpose, index=spec.index, source=spec.source
            )
        )

    def prompted(self, request: RequestState, event: PromptReady, now: Now) -> None:
        tokens, context_tokens = len(event.token_ids), self.setup.context_tokens
        if not 1 <= tokens < context_tokens:
            why = f"a prompt of {tokens} tokens does not fit a context of {context_tokens}"
            failed = TaskFailed(request=request.key, error="PromptUnfit", message=why)
            self.prompt_failed(request, failed, now)
            return
        request.sequence = TokenSequence(event.token_ids, at_ns=now.wall_ns)
        request.episode = event.episode
        request.replayable = event.episode and event.replayable
        if request.chain.resume is None or not request.recorded:
            request.chain.resume = None
            self._wait(request)
            return
        self.enter(request, Phase.RESUMING)
        self.ask(FetchProgress(request=request.key, resume=request.chain.resume))

    def prompt_failed(self, request: RequestState, event: TaskFailed, now: Now) -> None:
        message = f"row {request.place.spec.index}: {event.message}"
        self.give_up(request, now, event.error, message, retryable=False)

    def resumed(self, request: RequestState, event: ProgressFetched, now: Now) -> None:
        prompt = request.sequence.token_ids
        sequence = self.recorded_sequence(request, event)
        if isinstance(sequence, str) or sequence.prompt != prompt:
            self.discard_progress(request)
            return
        request.continue_from(sequence, event.chunks)
        finish = request.finish_of(self.setup.context_tokens)
        if finish is None:
            self.fetch_kv(request)
        else:
            self.complete(request, finish, now)

    def recorded_sequence(
        self, request: RequestState, event: ProgressFetched
    ) -> TokenSequence | str:
        """Return the sequence of a request's progress records, or why they are unusable."""
        assert request.chain.resume is not None
        spec = request.place.spec
        why = event.why or chain_error(
            event.chunks,
            trajectory=request.place.trajectory,
            version=spec.version,
            digest=spec.digest,
            tokens=request.chain.resume.tokens,
            newest=self.served.version if request.pin == ANY_VERSION else None,
        )
        return why or sequence_of(event.chunks)

    def discard_progress(self, request: RequestState) -> None:
        self.counts["progress unusable"] += 1
        request.chain.resume = None
        self._wait(request)

    def fetch_kv(self, request: RequestState) -> None:
        if request.cache.blob is None:
            self._wait(request)
            return
        self.enter(request, Phase.FETCHING)
        label = label_of(request.place.trajectory, request.sequence.token_ids)
        self.ask(FetchKv(request=request.key, label=label, blob=request.cache.blob))

    def kv_fetched(self, request: RequestState, event: KvFetched, now: Now) -> None:
        request.cache.kv = event.kv
        if event.kv is None:
            request.cache.blob = None
            self.counts[f"KV cache not fetched: {event.why}"] += 1
        self._wait(request)

    # WAITING, RUNNING

    def _wait(self, request: RequestState) -> None:
        self.enter(request, Phase.WAITING)
        self.enqueue(request)

    def fill(self, *versions: int) -> None:
        """Send waiting requests to the engine, some ahead of its slots."""
        emit_every = min(self.setup.checkpoint_tokens, EMIT_EVERY_TOKENS)
        for _ in range(self.room):
            request = self.next_waiting(*versions)
            if request is None:
                return
            self.hand(request)
            self.ask(EngineAdd(request=engine_request_of(request, emit_every)))

    def started(self, request: RequestState, event: EngineStarted, now: Now) -> None:
        self.slot_taken(request)
        self.enter(request, Phase.RUNNING)
        request.under(self.served)
        request.turn.finish = None
        request.sequence.start_stay(event.at_ns, imported=event.imported)
        request.started_ns = request.started_ns or event.at_ns
        if event.imported:
            self.counts["KV caches imported"] += 1
        elif event.why:
            self.counts[f"KV cache not imported: {event.why}"] += 1
        self.drop_kv(request)

    def sampled(self, request: RequestState, event: TokensSampled, now: Now) -> None:
        request.sequence.sampled(
            event.token_ids, event.logprobs, event.sampler_logprobs, event.routes
        )
        self.tokens_total += len(event.token_ids)
        if request.first_token_ns is None:
            request.first_token_ns = event.first_token_ns
        if request.recorded:
            self.grown[request.key] = None

    def weights_replaced(self, served: Served, now: Now) -> None:
        """Continue running requests, prefilled again under another version."""
        self.served = served
        setup = self.setup
        for request in self.by_key.values():
            if request.phase is Phase.RUNNING:
                version = request.served.version
                request.sequence.reload(
                    now.wall_ns, worker=setup.worker, incarnation=setup.incarnation, version=version
                )
                request.under(served)

    def finished(self, request: RequestState, event: RequestFinished, now: Now) -> None:
        setup, version = self.setup, request.served.version
        request.sequence.end_stay(
            now.wall_ns, worker=setup.worker, incarnation=setup.incarnation, version=version
        )
        if event.reason == "error":
            self.broken(request, event.error or "the engine gave no reason", now)
            return
        if request.replayable:
            request.turn.finish = event.reason
            self.begin_chunk(request, 1)
            if request.key not in self.by_key:
                return
        if not request.episode or event.reason != "stop":
            self.complete(request, event.reason, now)
        elif request.phase is Phase.EXPORTING:
            self._leave_between_turns(request, now)
        else:
            self.ask_environment(request, request.sequence.answer(), now)

    # ENVIRONMENT

    def ask_environment(self, request: RequestState, token_ids: Sequence[int], now: Now) -> None:
        self.enter(request, Phase.ENVIRONMENT)
        request.turn.asked_ns = now.wall_ns
        self.ask(EnvStep(request=request.key, token_ids=token_ids, source=request.source))

    def observed(self, request: RequestState, event: EnvObserved, now: Now) -> None:
        """Append an observation; one that does not fit ends the request by length."""
        sequence, setup = request.sequence, self.setup
        request.tool_error = request.tool_error or event.error
        fits = len(sequence) + len(event.token_ids) <= setup.context_tokens
        if fits:
            sequence.observed(
                event.token_ids,
                asked_ns=request.turn.asked_ns,
                at_ns=now.wall_ns,
                tool=event.tool,
                ok=event.ok,
            )
        full = not fits or len(sequence) >= setup.context_tokens
        spent = sequence.sampled_tokens >= request.params.max_tokens
        if event.done:
            self.complete(request, "environment", now)
        elif full or spent or sequence.turns_taken >= request.max_turns:
            self.complete(request, "length", now)
        else:
            self._wait(request)

    def environment_failed(self, request: RequestState, event: TaskFailed, now: Now) -> None:
        self.broken(request, f"{event.error}: {event.message}", now)

    def episode_lost(self, request: RequestState, event: EpisodeLost, now: Now) -> None:
        """Hand back a request whose process died; another attempt continues from its progress."""
        self.give_up(request, now, "EpisodeLost", event.message, retryable=True)

    # REWARDING, LOGGING

    def complete(
        self,
        request: RequestState,
        finish: FinishReason,
        now: Now,
        *,
        answer: Sequence[int] | None = None,
        before: Sequence[int] = (),
        text: str | None = None,
        rewarded: Rewarded | None = None,
    ) -> None:
        """Request the reward of a complete sequence, unless it is known.

        In sessions the last answer may differ from the last tokens.
        """
        request.finish, request.finished_ns = finish, now.wall_ns
        request.score.by = "task" if rewarded is None else "agent"
        request.score.agent_answer = text
        self.enter(request, Phase.REWARDING)
        if rewarded is not None:
            self.rewarded(request, rewarded, now)
            return
        spec, sequence = request.place.spec, request.sequence
        self.ask(
            RewardCall(
                request=request.key,
                split=spec.purpose,
                index=spec.index,
                sampled=SampledTurns(
                    answer=sequence.answer() if answer is None else answer,
                    turns=sequence.turns(),
                    before=before,
                ),
                agent_answer=text,
                source=spec.source,
            )
        )

    def broken(self, request: RequestState, error: str, now: Now) -> None:
        request.finish, request.finished_ns, request.error = "error", now.wall_ns, error
        request.score.error = f"not scored: {error}"
        if request.episode:
            self.ask(Forget(request=request.key, source=request.source))
        self.log(request)

    def rewarded(self, request: RequestState, event: Rewarded, now: Now) -> None:
        if math.isfinite(event.reward):
            request.score.reward, request.score.raw = event.reward, event.raw
            request.score.parts, request.score.answer = dict(event.parts), event.answer
        else:
            request.score.error = f"NoAnswer: the reward is {event.reward}"
        request.score.at_ns = now.wall_ns
        self.log(request)

    def reward_failed(self, request: RequestState, event: TaskFailed, now: Now) -> None:
        request.score.error = f"{event.error}: {event.message}"
        request.score.at_ns = now.wall_ns
        self.log(request)

    def log(self, request: RequestState) -> None:
        self.enter(request, Phase.LOGGING)
        trajectory = trajectory_of(request, self.setup)
        encoded = self.encoded(request, partial(_with_pairs, trajectory))
        if encoded is None:
            return
        value, headers, pairs = encoded
        if len(value) > VALUE_BYTES_MAX:
            message = f"a trajectory of {len(value)} bytes is above {VALUE_BYTES_MAX}"
            self.give_up(request, self.now, "RecordTooLarge", message, retryable=False)
            return
        request.sha256, request.value_bytes = headers.sha256, len(value)
        append = Append(
            topic=self.setup.topics.trajectories,
            partition=request.place.spec.partition,
            key=request.place.spec.group.encode(),
            value=value,
            headers=pairs,
            digest=headers.sha256,
        )
        self.out.publish.append(Publish(record=append, tag=TRAJECTORY_TAG + request.key))

    def trajectory_published(self, request: RequestState, event: Published, now: Now) -> None:
        self.counts["logged"] += 1
        spec = request.place.spec
        entries = self.logged.setdefault((spec.version, spec.digest), [])
        entries.append(logged_of(request, offset=event.offset))
        self.remove(request)

    # Progress records

    def chunk_published(self, request: RequestState, event: Published, now: Now) -> None:
        request.chain.resume = Resume(
            tokens=request.chain.end, partition=event.partition, offset=event.offset
        )
        request.chain.open = False
        if request.phase is Phase.LEAVING:
            self._abandon_if_durable(request)
        elif request.phase is Phase.RELEASING:
            self._release_if_durable(request, now)
        elif request.phase is Phase.RUNNING:
            self.grown[request.key] = None
        elif request.episode:
            self.begin_chunk(request, 1)  # a turn has ended meanwhile

    # Moving to another worker: EXPORTING, RELEASING

    def move(self, trajectory: str, attempt: int, now: Now) -> None:
        """Release a request to another worker.

        A running request leaves the engine; its last tokens go to the progress topic and its KV
        cache to the handover, in parallel.
        """
        request = self.by_key.get(key_of(trajectory, attempt))
        if request is not None and not request.recorded:
            self.counts["moves of episodes refused"] += 1
        elif request is not None and request.phase is Phase.RUNNING:
            self.enter(request, Phase.EXPORTING)
            self.ask(EngineExport(request=request.key))
        elif request is not None and request.episode and request.phase in GENERATING:
            self._leave_between_turns(request, now)
        elif request is not None and request.phase in (*WAITING_PHASES, Phase.AGENT):
            self._release(request, now)
        elif request is not None and request.phase in MOVING:
            self.counts["moved twice"] += 1
        else:
            self.counts["moved too late"] += 1

    def _leave_between_turns(self, request: RequestState, now: Now) -> None:
        self.leave_engine(request)
        self.enter(request, Phase.RELEASING)
        self._release_if_durable(request, now)

    def exported(self, request: RequestState, event: EngineExported, now: Now) -> None:
        self.enter(request, Phase.RELEASING)
        sequence, kv = request.sequence, event.kv
        if kv is not None and sequence.sampled_tokens and kv.tokens == len(sequence) - 1:
            request.cache.offered = True
            label = label_of(request.place.trajectory, sequence.token_ids)
            self.ask(PutKv(request=request.key, label=label, kv=kv))
        self._release_if_durable(request, now)

    def kv_put(self, request: RequestState, event: KvPut, now: Now) -> None:
        request.cache.offered, request.cache.blob = False, event.blob
        if event.blob is None:
            self.counts[f"KV cache not handed over: {event.why}"] += 1
        self._release_if_durable(request, now)

    def _release_if_durable(self, request: RequestState, now: Now) -> None:
        if self.all_durable(request) and not request.cache.offered:
            self._release(request, now)

    def _release(self, request: RequestState, now: Now) -> None:
        self.publish_control(request.place.trajectory, released_of(request, self.setup, now))
        self.counts["released"] += 1
        self.release(request)

    # Leaving with the worker

    def leave(self) -> None:
        self.versions = frozenset()
        for request in self.all_generating():
            if request.recorded and (request.episode or request.phase is Phase.RUNNING):
                self.leave_engine(request)
                self.enter(request, Phase.LEAVING)
                self._abandon_if_durable(request)
            else:
                self._abandon_with_progress(request)

    def _abandon_if_durable(self, request: RequestState) -> None:
        if self.all_durable(request):
            self._abandon_with_progress(request)

    def _abandon_with_progress(self, request: RequestState) -> None:
        if request.chain.resume is not None:
            self.abandoned_progress[request.place.trajectory] = request.chain.resume
        self.abandon(request)


def _with_pairs(trajectory: Trajectory) -> tuple[bytes, Headers, tuple[tuple[str, bytes], ...]]:
    value, headers = encode_trajectory(trajectory)
    return value, headers, header_pairs(headers)

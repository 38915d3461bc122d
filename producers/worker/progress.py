"""Progress records of a worker's requests."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from dora_pipe.core.errors import SchemaError, reason
from dora_pipe.core.pure.machine import Publish
from dora_pipe.core.pure.records import Append
from dora_pipe.producers.worker.request import Phase, RequestState, WorkerSetup
from dora_pipe.producers.worker.request_records import episode_progress_of, progress_of
from dora_pipe.producers.worker.request_table import RequestTable
from dora_pipe.schemas.trajectory_codec import AnyProgress, encode_any_progress

PROGRESS_TAG: Final = "p:"

UNENCODABLE: Final = (SchemaError, ValueError, TypeError, OverflowError)
"""Errors of encoding a record that must not be logged."""


class ProgressRecords(RequestTable):
    """Request table that writes progress records."""

    def __init__(self, setup: WorkerSetup, codec: AbstractContextManager[object]) -> None:
        super().__init__(setup)
        self.codec = codec
        """Meters the time of encoding."""
        self.grown: dict[str, None] = {}

    def write_progress(self) -> None:
        """Start progress records of requests with enough new tokens."""
        for key in self.grown:
            request = self.by_key.get(key)
            if request is not None and request.phase is Phase.RUNNING:
                self.begin_chunk(request, self.setup.checkpoint_tokens)
        self.grown.clear()

    def begin_chunk(self, request: RequestState, tokens_min: int) -> bool:
        """Start a progress record unless one is open or tokens are too few."""
        unwritten = request.sequence.sampled_tokens - request.chain.end
        if request.chain.open or unwritten < tokens_min or not request.recorded:
            return False
        progress: AnyProgress
        if request.episode:
            progress = episode_progress_of(request, self.setup)
            request.chain.end += sum(progress.loss_mask)
        else:
            progress = progress_of(request, self.setup)
            request.chain.end += len(progress.token_ids)
        request.chain.open = True
        self.append_progress(request, progress, request)
        return True

    def all_durable(self, request: RequestState) -> bool:
        """Return whether progress records cover all sampled tokens; if not, start the last one."""
        return not self.begin_chunk(request, 1) and not request.chain.open

    def append_progress(
        self, request: RequestState, progress: AnyProgress, owner: RequestState
    ) -> None:
        """Log a record of `request`; one that breaks its schema fails `owner`."""
        try:
            with self.codec:
                value = encode_any_progress(progress)
        except UNENCODABLE as error:
            self.give_up(owner, self.now, "SchemaError", reason(error), retryable=False)
            return
        append = Append(
            topic=self.setup.topics.progress,
            partition=request.place.spec.partition,
            key=request.place.trajectory.encode(),
            value=value,
        )
        self.out.publish.append(Publish(record=append, tag=PROGRESS_TAG + request.key))

    def drop_all(self) -> None:
        super().drop_all()
        self.grown.clear()

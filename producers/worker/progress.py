"""Progress records of a worker's requests: when what was sampled is written to the log."""

from __future__ import annotations

from typing import Final

from dora_pipe.bus.port import Append
from dora_pipe.core.runtime import Now, Publish
from dora_pipe.producers.worker.effects import EncodeProgress, ProgressEncoded
from dora_pipe.producers.worker.request import Phase, RequestState, WorkerSetup
from dora_pipe.producers.worker.request_records import episode_progress_of, progress_of
from dora_pipe.producers.worker.request_table import RequestTable
from dora_pipe.schemas.trajectory_codec import AnyProgress

PROGRESS_TAG: Final = "p:"
"""Tag of what a request publishes; its key follows."""


class ProgressRecords(RequestTable):
    """The requests of one incarnation, and which of their tokens are on their way to the log."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(setup)
        self.grown: dict[str, None] = {}
        """Keys of requests that have sampled since it was last looked at them."""

    def write_progress(self) -> None:
        """Start a progress record of every request that has sampled enough since the last one."""
        for key in self.grown:
            request = self.by_key.get(key)
            if request is not None and request.phase is Phase.RUNNING:
                self.begin_chunk(request, self.setup.checkpoint_tokens)
        self.grown.clear()

    def begin_chunk(self, request: RequestState, tokens_min: int) -> bool:
        """Start a progress record if none is under way and there is enough to write."""
        unwritten = request.sequence.sampled_tokens - request.chunk_end
        if request.chunk_open or unwritten < tokens_min or not request.recorded:
            return False
        progress: AnyProgress
        if request.episode:
            progress = episode_progress_of(request, self.setup)
            request.chunk_end += sum(progress.loss_mask)
        else:
            progress = progress_of(request, self.setup)
            request.chunk_end += len(progress.token_ids)
        request.chunk_open = True
        self.ask(EncodeProgress(request=request.key, progress=progress))
        return True

    def all_durable(self, request: RequestState) -> bool:
        """Whether its progress records hold all that was sampled; if not, the last is begun."""
        return not self.begin_chunk(request, 1) and not request.chunk_open

    def append_progress(self, request: RequestState, event: ProgressEncoded, now: Now) -> None:
        """Publish a progress record under the request's tag."""
        append = Append(
            topic=self.setup.topics.progress,
            partition=request.place.spec.partition,
            key=request.place.trajectory.encode(),
            value=event.value,
        )
        self.out.publish.append(Publish(record=append, tag=PROGRESS_TAG + request.key))

    def drop_all(self) -> None:
        super().drop_all()
        self.grown.clear()

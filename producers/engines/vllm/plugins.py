"""The classes that vLLM imports by their names into the process of its engine core: KV connectors,
and a scheduler for adapters on a CPU.

A connector lets a request begin with the KV cache that it came with. vLLM makes two of these. The
scheduler's knows which stays were offered a cache, answers how many tokens of it are to be had
beyond those that vLLM has, and notes the blocks that vLLM gives for them. The worker's, which holds
nothing, writes them in the same step, after new blocks were cleared and before the model runs, so
that this step computes the last token alone.

In this process a cache is offered as an array, to a server as a file that its request names: there
the worker's half is in each of vLLM's processes, which reads its own heads. Whoever wrote the file
may be gone by then; what was not read is computed by vLLM.

A cache is offered once: a stay that vLLM sets aside afterwards is prefilled again by vLLM. Nothing
is given out here; `kv` reads the cache of a running request from its blocks.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.scheduler import Scheduler

from dora_pipe.producers.engines.port import Array
from dora_pipe.producers.engines.vllm.kv import own_heads, write
from dora_pipe.producers.engines.vllm.kv_files import opened
from dora_pipe.producers.engines.vllm.wire import KV_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Positions of a cache from `start` on that shall be in these blocks."""

    source: Array | Path
    """The cache, or its file."""
    start: int
    blocks: list[int]


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half tells the worker's of a step."""

    loads: list[Load] = field(default_factory=list)


class Connector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. One for all groups of a KV cache, so that vLLM arranges them as without it.

    Example: ``scheduler.connector.offer("r/1", array)`` before the request is added.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.offered: dict[str, Array] = {}
        """By stay, [layers, 2, tokens, kv_heads, head_dim]; until vLLM has blocks for it."""
        self._loads: list[Load] = []
        self._lost: set[int] = set()

    def offer(self, stay: str, array: Array) -> None:
        """A stay that vLLM gets next begins with this cache."""
        self.offered[stay] = array

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens more than vLLM has are here; they are written within the step."""
        array = self.offered.get(request.request_id)
        return (0 if array is None else max(0, array.shape[2] - num_computed_tokens)), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has blocks for a request, and wants so many tokens from here."""
        array = self.offered.pop(request.request_id, None)
        if array is not None and num_external_tokens:
            (own,) = blocks.get_block_ids()
            start = array.shape[2] - num_external_tokens
            self._loads.append(Load(source=array, start=start, blocks=own))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """What the worker shall write in the step that was just arranged."""
        made, self._loads = Loads(self._loads), []
        return made

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        """Write what the scheduler's half noted; in the worker."""
        layers = forward_context.no_compile_layers
        for load in self._get_connector_metadata().loads:
            try:
                array = opened(load.source) if isinstance(load.source, Path) else load.source
            except OSError:
                self._lost.update(load.blocks)
            else:
                own = array[:, :, :, own_heads(array.shape[3])]
                write(layers, own, load.blocks, start=load.start)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that were not written in this step; vLLM computes what they should hold."""
        lost, self._lost = self._lost, set()
        return lost

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are there before the first one runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any
    ) -> None:
        """Nothing is saved within a step."""

    def wait_for_save(self) -> None:
        """There is nothing to wait for."""

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks are free at once; what it was offered is forgotten."""
        self.offered.pop(request.request_id, None)
        return False, None


def _file_of(source: Array | Path) -> Path:
    assert isinstance(source, np.memmap) and source.filename is not None
    return Path(source.filename)


class ServerConnector(Connector):
    """Of a server: a request names the file of its cache (`KV_FILE` of its `extra_args`), and the
    step is told of files, not of arrays, which would go to every process."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._known: set[str] = set()
        """Stays whose file was looked for."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """See `Connector`; a file that is gone has none."""
        named = (request.sampling_params.extra_args or {}).get(KV_FILE)
        if named and request.request_id not in self._known:
            self._known.add(request.request_id)
            with suppress(OSError):
                self.offer(request.request_id, opened(Path(named)))
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        made = super().build_connector_meta(scheduler_output)
        return Loads([replace(one, source=_file_of(one.source)) for one in made.loads])

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        self._known.discard(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


class ClearingScheduler(Scheduler):  # type: ignore[misc]
    """Has every block of the KV cache cleared before a request gets it, as vLLM does for some
    models by itself.

    Its attention on a CPU multiplies what lies behind the end of a sequence by zero, which a number
    that is not finite survives: rows of a broken version would spoil those that get their blocks.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.needs_kv_cache_zeroing = True
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            manager._record_new_block_ids = True

"""The classes that vLLM imports by their names into the process of its engine core: KV connectors,
and a scheduler for adapters on a CPU.

The connector lets a request begin with the KV cache that it came with. vLLM makes two of these.
The scheduler's half knows which requests name the file of a cache, answers how many tokens of it
are available beyond those that vLLM has, and notes the blocks that vLLM gives for them. The
worker's half, one in each of vLLM's processes, reads its own heads from the file and writes them
in the same step, after new blocks were cleared and before the model runs, so that this step
computes the last token alone. The process that wrote the file may have ended by then; vLLM
computes what was not read.

A cache is offered once: vLLM prefills a request again that it preempts afterwards. `kv` reads the
cache of a running request from its blocks.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.scheduler import Scheduler

from dora_pipe.producers.engines.vllm.kv import own_heads, write
from dora_pipe.producers.engines.vllm.kv_files import opened
from dora_pipe.producers.engines.vllm.wire import KV_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Positions of a cache from `start` on that shall be in these blocks."""

    file: Path
    start: int
    blocks: list[int]


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half tells the worker's of a step."""

    loads: list[Load] = field(default_factory=list)


class ServerConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Begins requests with the cache in the file that they name (`KV_FILE` of `extra_args`); see
    the module. One for all groups of a KV cache, so that vLLM arranges them as without it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._offered: dict[str, tuple[Path, int] | None] = {}
        """By request, the file of its cache and the tokens of it until vLLM has blocks for them;
        None: its file was gone, or is read."""
        self._loads: list[Load] = []
        self._lost: set[int] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens more than vLLM has are in the request's file."""
        named = (request.sampling_params.extra_args or {}).get(KV_FILE)
        if named and request.request_id not in self._offered:
            self._offered[request.request_id] = None
            with suppress(OSError):
                tokens = opened(Path(named)).shape[2]
                self._offered[request.request_id] = Path(named), tokens
        _, tokens = self._offered.get(request.request_id) or (None, 0)
        return max(0, tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks that vLLM has for the tokens of a request's file."""
        offered = self._offered.get(request.request_id)
        if offered is None:
            return
        self._offered[request.request_id] = None
        if num_external_tokens:
            (own,) = blocks.get_block_ids()
            file, tokens = offered
            self._loads.append(Load(file=file, start=tokens - num_external_tokens, blocks=own))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """Return what the worker shall write in the step that was just arranged."""
        made, self._loads = Loads(self._loads), []
        return made

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        """Write what the scheduler's half noted; in the worker."""
        layers = forward_context.no_compile_layers
        for load in self._get_connector_metadata().loads:
            try:
                array = opened(load.file)
            except OSError:
                self._lost.update(load.blocks)
            else:
                own = array[:, :, :, own_heads(array.shape[3])]
                write(layers, own, load.blocks, start=load.start)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not written in this step; vLLM computes what they hold."""
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
        """Forget the request's file; its blocks are free at once."""
        self._offered.pop(request.request_id, None)
        return False, None


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

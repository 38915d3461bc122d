"""Classes that vLLM imports by name: a KV connector, and a scheduler for adapters on a CPU.

The connector starts a request from an imported KV cache. Its scheduler half offers the file's
tokens and notes their blocks; its worker half writes them before the model runs, so the step
computes only the last token. vLLM computes what could not be read.
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
    """Positions from `start` on, to write into blocks."""

    file: Path
    start: int
    blocks: list[int]


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    loads: list[Load] = field(default_factory=list)


class ServerConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Starts requests from the file of their KV cache (`KV_FILE`). It serves all KV cache groups,
    so that vLLM's layout is unchanged."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._offered: dict[str, tuple[Path, int] | None] = {}
        """File and tokens until blocks are allocated; None: missing or read."""
        self._loads: list[Load] = []
        self._lost: set[int] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the file's tokens that vLLM lacks."""
        named = (request.sampling_params.extra_args or {}).get(KV_FILE)
        if named and request.request_id not in self._offered:
            self._offered[request.request_id] = None
            with suppress(OSError):
                tokens = opened(Path(named)).shape[2]
                self._offered[request.request_id] = Path(named), tokens
        _, tokens = self._offered.get(request.request_id) or (None, 0)
        return max(0, tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks for a file."""
        offered = self._offered.get(request.request_id)
        if offered is None:
            return
        self._offered[request.request_id] = None
        if num_external_tokens:
            (own,) = blocks.get_block_ids()
            file, tokens = offered
            self._loads.append(Load(file=file, start=tokens - num_external_tokens, blocks=own))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = Loads(self._loads), []
        return loads

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
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
        """Return unwritten blocks, which vLLM computes."""
        lost, self._lost = self._lost, set()
        return lost

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the file; blocks are freed at once."""
        self._offered.pop(request.request_id, None)
        return False, None


class ClearingScheduler(Scheduler):  # type: ignore[misc]
    """Scheduler that clears every KV cache block before use.

    vLLM's CPU attention multiplies values after a sequence's end by zero; values that are not
    finite would spread.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self.needs_kv_cache_zeroing = True
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            manager._record_new_block_ids = True

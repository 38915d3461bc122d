"""vLLM's scheduler for adapters on a CPU; decides that blocks of the KV cache are cleared.

vLLM imports this in the process of its engine core, where `scheduler_cls` names it.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


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

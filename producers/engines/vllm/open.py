"""Opens the vLLM engines for a worker: in its process, or behind a server; decides nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.config.model import Config, versions_resident
from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.stops import Decode
from dora_pipe.producers.engines.vllm.core import VllmSettings


def open_vllm(assets: Path, config: Config, decode: Decode) -> Engine:
    """vLLM for a model directory. Raises ConfigError for a server's address without a key."""
    workers = config.workers
    keys = msgspec.structs.asdict(workers.vllm)
    addresses = keys.pop("addresses")
    common: dict[str, Any] = {
        "slots": workers.slots,
        "context_tokens": workers.context_tokens,
        "threads": workers.threads,
        "settings": VllmSettings(**keys),
        "decode": decode,
        "lora_rank": config.lora.rank,
        "versions_resident": versions_resident(config),
    }
    if workers.engine == "vllm":
        from dora_pipe.producers.engines.vllm.engine import VllmEngine

        return VllmEngine.open(assets, **common)
    from dora_pipe.producers.engines.vllm.http import Address
    from dora_pipe.producers.engines.vllm.serve import KEY_VARIABLE
    from dora_pipe.producers.engines.vllm.server import VllmServerEngine

    if not addresses:
        return VllmServerEngine.open(assets, **common)
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ConfigError(
            f"no key for vLLM's server at {addresses[0]}",
            hint=f"set {KEY_VARIABLE} as the server has it",
        )
    return VllmServerEngine.open(assets, **common, address=Address.of(addresses[0], key))

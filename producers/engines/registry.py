"""The engines that a worker can use, and checks of their support for a run. Only `open` imports an
engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dora_pipe.config.model import Config, max_resident_versions
from dora_pipe.core.errors import ConfigError, install_hint
from dora_pipe.core.system.own_code import importable, load_kind, need_packages
from dora_pipe.producers.engines.engine import (
    COUNTER_SAMPLING,
    KV_EXPORT,
    LORA,
    PARTIAL_ROLLOUT,
    PREFILL_EXACT,
    ROUTES,
    SLEEP,
    UNASSIGNED_LEFT_OUT,
    Engine,
)
from dora_pipe.producers.engines.requests import Decode
from dora_pipe.producers.engines.vllm.options import check_args
from dora_pipe.store.model_dir import unassigned_ids

MOVES: Final = "moves"
"""Capability to migrate running requests; see `Requests.move`."""

VLLM: Final = "vllm"

VLLM_RANK_MAX: Final = 512

VLLM_HINT: Final = f"make vllm (CPU), make gpu or {install_hint('vllm')}; see docs/engines.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Properties of an engine before it is opened."""

    open: Callable[[Path, Config, Decode], Engine]
    """Opens a model directory. Raises ConfigError, PolicyError."""
    packages: tuple[str, ...] = ()
    hint: str = ""
    """Hint if a package is missing."""
    check_model: Callable[[Path, Config], None] | None = None
    """Raises PolicyError for an unsupported model, ConfigError for conflicting keys."""
    gpus: bool = True
    lora_rank_max: int | None = None
    """Maximum adapter rank; None: unlimited."""


def engine_kind(name: str, directory: str = "") -> EngineKind:
    """Return an engine; `directory` contains a user's module. Raises ConfigError."""
    hint = "docs/engines.md describes engines"
    return load_kind("workers.engine", name, EngineKind, BUILT_IN, directory=directory, hint=hint)


def need_engines(names: Iterable[str], directory: str = "") -> None:
    """Raise ConfigError if a required package is missing."""
    for name in sorted(set(names)):
        kind = engine_kind(name, directory)
        need_packages(f"engine {name!r}", kind.packages, kind.hint)


def check_engines(config: Config, names: Iterable[str]) -> None:
    """Raise ConfigError if an engine does not support the config."""
    rank = config.lora.rank
    for name in sorted(set(names)):
        kind = engine_kind(name, config.task.directory)
        if name == VLLM:
            check_args(config.workers.vllm.args)
        if (
            config.sampling.return_routed_experts
            and name == VLLM
            and not config.workers.vllm.enforce_eager
        ):
            raise ConfigError(
                "sampling.return_routed_experts: vLLM's compiled graphs report no routed experts",
                hint="workers.vllm.enforce_eager = true",
            )
        if kind.lora_rank_max is not None and rank > kind.lora_rank_max:
            raise ConfigError(
                f"lora.rank: {name} hosts adapters of ranks up to {kind.lora_rank_max}, not {rank}"
            )


def check_model(config: Config, names: Iterable[str], directory: Path) -> None:
    """Raise PolicyError for an unsupported model, ConfigError if contexts do not fit."""
    for name in sorted(set(names)):
        check = engine_kind(name, config.task.directory).check_model
        if check is not None:
            check(directory, config)


def capabilities(engine: Engine, *, moves: bool) -> tuple[str, ...]:
    """Return the worker's capabilities. Migration requires `moves`, and resuming by cache or exact
    prefill with the same random stream."""
    goes_on = {KV_EXPORT, PREFILL_EXACT, COUNTER_SAMPLING} & engine.declares
    return tuple(sorted(engine.declares | ({MOVES} if goes_on and moves else set())))


def check_capabilities(
    engine: Engine, config: Config, assets: Path | None = None, *, colocated: bool = False
) -> None:
    """Raise ConfigError for a capability that the run, a colocated worker or the model needs
    and the engine lacks."""
    if assets is not None and unassigned_ids(assets) and UNASSIGNED_LEFT_OUT not in engine.declares:
        raise ConfigError(
            f"the model has embedding rows without a token, and engine {engine.name} may sample"
            " them",
            hint=f"an engine that never does declares {UNASSIGNED_LEFT_OUT} (docs/engines.md)",
        )
    if colocated and SLEEP not in engine.declares:
        raise ConfigError(
            f"workers.colocated: engine {engine.name} cannot release its weights between steps",
            hint="workers.engine = torch or vllm, or a run without colocated workers",
        )
    if config.staleness.partial_rollout and PARTIAL_ROLLOUT not in engine.declares:
        raise ConfigError(
            f"the run has partial rollout, and engine {engine.name} cannot change weights under"
            " running requests",
            hint="use another engine, or start a run with staleness.partial_rollout = false",
        )
    if config.lora.rank and LORA not in engine.declares:
        raise ConfigError(
            f"the run trains a LoRA adapter, and engine {engine.name} does not support adapters",
            hint="workers.engine = torch or vllm, or start a run with lora.rank = 0",
        )
    if config.sampling.return_routed_experts and ROUTES not in engine.declares:
        raise ConfigError(
            f"sampling.return_routed_experts: engine {engine.name} does not report routed experts",
            hint="workers.engine = torch or vllm, or start a run without the key",
        )


def open_engine(*, assets: Path, config: Config, decode: Decode) -> Engine:
    """Open the configured engine. Raises ConfigError."""
    name, modules = config.workers.engine, config.task.directory
    need_engines([name], modules)
    with importable(modules):
        return engine_kind(name).open(assets, config, decode)


def _sizes(config: Config, decode: Decode) -> dict[str, Any]:
    return {
        "slots": config.workers.max_num_seqs,
        "context_tokens": config.workers.max_model_len,
        "threads": config.workers.threads,
        "decode": decode,
        "lora_rank": config.lora.rank,
        "max_resident_versions": max_resident_versions(config),
    }


def _open_torch(assets: Path, config: Config, decode: Decode) -> Engine:
    from dora_pipe.producers.engines.torch.engine import TorchEngine

    return TorchEngine.open(
        assets,
        **_sizes(config, decode),
        prefix_cache_ratio=config.workers.prefix_cache_ratio,
        routes=config.sampling.return_routed_experts,
    )


def _check_torch_model(directory: Path, config: Config) -> None:
    from dora_pipe.producers.engines.torch.causal_lm import need_experts, read_causal_lm

    model = read_causal_lm(directory, context_tokens=config.workers.max_model_len)
    if config.sampling.return_routed_experts:
        need_experts(model, directory, context_tokens=config.workers.max_model_len)


def _check_vllm_model(directory: Path, config: Config) -> None:
    from dora_pipe.producers.engines.base import need_positions
    from dora_pipe.producers.engines.vllm.core import need_kv_room

    context_tokens = config.workers.max_model_len
    need_positions(directory, context_tokens)
    if not config.workers.vllm.addresses:  # The sizes of a running server are set elsewhere.
        need_kv_room(directory, config.workers.vllm, context_tokens)


def _open_vllm(assets: Path, config: Config, decode: Decode) -> Engine:
    from dora_pipe.producers.engines.vllm.http import Address
    from dora_pipe.producers.engines.vllm.serve import KEY_VARIABLE
    from dora_pipe.producers.engines.vllm.server import VllmEngine
    from dora_pipe.producers.engines.vllm.stock import SAMPLING, has_logprobs

    if not config.workers.vllm.addresses:
        _check_vllm_model(assets, config)  # fail before the server starts
    addresses, key = config.workers.vllm.addresses, os.environ.get(KEY_VARIABLE, "")
    if addresses and not key:
        raise ConfigError(
            f"no key for vLLM's server at {addresses[0]}",
            hint=f"set {KEY_VARIABLE} as the server has it",
        )
    address = Address.of(addresses[0], key) if addresses else None
    engine = VllmEngine(
        assets,
        **_sizes(config, decode),
        settings=config.workers.vllm,
        sleep=config.workers.colocated > 0,
        address=address,
        routes=config.sampling.return_routed_experts,
    )
    evaluated = [config.eval_sampling(evaluation) for evaluation in config.evaluations]
    if engine.stock and not all(map(has_logprobs, (config.sampling, *evaluated))):
        engine.close()
        raise ConfigError(SAMPLING, hint="start it with dora-pipe's extension (docs/engines.md)")
    return engine


BUILT_IN: Final[Mapping[str, EngineKind]] = {
    "torch": EngineKind(
        open=_open_torch,
        packages=("torch", "transformers", "safetensors"),
        hint=install_hint("torch"),
        check_model=_check_torch_model,
        gpus=False,
    ),
    "vllm": EngineKind(
        open=_open_vllm,
        packages=("vllm", "torch", "transformers", "safetensors", "h11"),
        hint=VLLM_HINT,
        check_model=_check_vllm_model,
        lora_rank_max=VLLM_RANK_MAX,
    ),
}

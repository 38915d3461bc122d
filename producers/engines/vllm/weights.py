"""Weight transfer engine in vLLM's worker.

All checks precede replacement. Each tensor is copied whole to the GPU from pinned memory and
converted there; vLLM alone would convert on the CPU and copy in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.torch.weights import OpenWeights
from dora_pipe.producers.engines.vllm.wire import RANDOM
from dora_pipe.store.carried_tensors import further_layers
from dora_pipe.store.network_names import stored, untied

BACKEND: Final = "dora-pipe"

ENGINE_NAME: Final = "Held"

Tensors = OpenWeights | Mapping[str, torch.Tensor]
"""Tensors by name in the file."""


def register() -> None:
    """Register the engine once per process. Requires vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())


def _engine_class() -> type[Any]:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    @dataclass
    class Init(WeightTransferInitInfo):  # type: ignore[misc]
        pass

    @dataclass
    class Digest(WeightTransferUpdateInfo):  # type: ignore[misc]
        digest: str = ""

    class Held(WeightTransferEngine):  # type: ignore[misc]
        """Loads the tensors of `hold` if their digest matches; `loaded` is that of the model."""

        init_info_cls, update_info_cls = Init, Digest
        held: tuple[str, Tensors] = ("", {})
        loaded = RANDOM

        def hold(self, digest: str, tensors: Tensors) -> None:
            """Keep tensors until the next update."""
            self.held = (digest, tensors)

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            self.loaded = RANDOM
            if self.device.type == "cpu":
                pack_experts_anew(self.model)
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            digest, tensors = self.held
            if digest != update_info.digest:
                raise ValueError(f"held are the weights {digest!r}")
            self.model.load_weights(on_device(tensors, self.device))
            self.loaded = digest

        def finish_weight_update(self) -> None:
            self.held = ("", {})
            finalize_layerwise_reload(self.model, self.model_config)
            pack_tied(self.model)
            if self.device.type != "cpu":  # include the copy in the load time
                torch.accelerator.synchronize()

        def shutdown(self) -> None:
            pass

    return Held


def on_device(tensors: Tensors, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors on the device. vLLM frees them by layer."""
    for name, tensor in tensors.items():
        if device.type == "cpu":
            yield name, tensor
        else:
            yield name, tensor.pin_memory().to(device, non_blocking=True)


def pack_experts_anew(model: Any) -> None:
    """Make vLLM pack the experts of the next weights: vLLM 0.32 on a CPU packs only when a layer
    gets its kernel (`UnquantizedFusedMoEMethod._setup_kernel`)."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_tied(model: Any) -> None:
    """Repack tied heads: vLLM 0.32 on a CPU packs on load, and they are never loaded."""
    sharing: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and hasattr(module, "cpu_linear"):
            sharing.setdefault(id(weight), []).append(module)
    for modules in sharing.values():
        for module in modules if len(modules) > 1 else ():
            module.quant_method.process_weights_after_loading(module)


def expected_tensors(model_dir: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str], range]:
    """Return shapes, tied tensors, and layers in files only, from transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    load: Any = AutoConfig.from_pretrained
    build: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            model = build(load(model_dir, local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        message = " ".join(str(error).split())
        raise PolicyError(
            f"{model_dir}: transformers does not know this model: {message}"
        ) from error
    first = {id(tensor): name for name, tensor in untied(model).items()}
    held = model.state_dict(keep_vars=True)
    state = {name: first[id(parameter)] for name, parameter in held.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in stored(model).items()}
    twins = {name: twin for name, twin in state.items() if name != twin}
    return shapes, twins, further_layers(model.config.get_text_config().to_dict())

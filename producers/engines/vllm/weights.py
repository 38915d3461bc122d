"""Hands weights to vLLM through its own transfer interface; decides nothing but what fits.

The tensors of a file are given one by one to a transfer engine of ours that lives inside vLLM's
worker. The digest, names and shapes are compared with those of the model before anything is
replaced, so that a refusal leaves the old weights.

To a GPU every tensor goes whole, by one copy out of pinned memory, and is rounded there if it has
to be: vLLM alone would round on the CPU and copy piece by piece out of pageable memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.torch.weights import OpenWeights
from dora_pipe.store.carried_tensors import further_layers
from dora_pipe.store.network_names import stored, untied

BACKEND: Final = "dora-pipe"
"""Takes tensors that vLLM's worker process has read, as the worker asks for over HTTP."""

ENGINE_NAME: Final = "Held"
"""The class of that backend."""

Tensors = OpenWeights | Mapping[str, torch.Tensor]
"""What is loaded, by the names of the file."""


def register() -> None:
    """Make the transfer engine known to vLLM, once per process. Needs vLLM."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())


def _engine_class() -> type[Any]:
    """The transfer engine, which takes what its worker has read before."""
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
        """Takes the tensors that `hold` was given, if their digest is the one that is asked for."""

        init_info_cls, update_info_cls = Init, Digest
        held: tuple[str, Tensors] = ("", {})

        def hold(self, digest: str, tensors: Tensors) -> None:
            """Keep tensors until the next update, or the next tensors."""
            self.held = (digest, tensors)

        def init_transfer_engine(self, init_info: Any) -> None:
            """There is nobody to meet."""

        def start_weight_update(self) -> None:
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

        def finish_weight_update(self) -> None:
            self.held = ("", {})
            finalize_layerwise_reload(self.model, self.model_config)
            pack_tied(self.model)
            if self.device.type != "cpu":  # the time of a load is that until it is there
                torch.accelerator.synchronize()

        def shutdown(self) -> None:
            """Nothing is held."""

    assert Held.__name__ == ENGINE_NAME
    return Held


def on_device(tensors: Tensors, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors in their order, each where the model computes when it is asked for.

    vLLM lets go of one when the layer is complete that it belongs to, so that a GPU holds those of
    a layer beside the model, not all. Torch uses pinned memory again whose copy is done.
    """
    for name, tensor in tensors.items():
        if device.type == "cpu":
            yield name, tensor
        else:
            yield name, tensor.pin_memory().to(device, non_blocking=True)


def pack_experts_anew(model: Any) -> None:
    """Let the experts of a mixture be packed when the weights that come are loaded.

    On a CPU, vLLM 0.32 packs and pads experts when a layer gets its kernel, and what is loaded
    later goes unpacked into the same memory (`UnquantizedFusedMoEMethod._setup_kernel`). A layer
    without a kernel gets one.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_tied(model: Any) -> None:
    """Let modules that share their weights pack them again.

    On a CPU, vLLM 0.32 computes with a packed copy, which it makes when a module's weights were
    loaded. None are loaded for a head that is tied to the embedding: it would go on with the copy
    of those before.
    """
    sharing: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and hasattr(module, "cpu_linear"):
            sharing.setdefault(id(weight), []).append(module)
    for modules in sharing.values():
        for module in modules if len(modules) > 1 else ():
            module.quant_method.process_weights_after_loading(module)


def expected_tensors(
    model_dir: Path,
) -> tuple[dict[str, tuple[int, ...]], dict[str, str], range]:
    """Name and shape of every tensor of the model's weights files, who is tied to whom, and which
    layers are in files alone.

    Asked of transformers, which makes the model without memory for it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    load: Any = AutoConfig.from_pretrained
    build: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            model = build(load(model_dir, local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        said = " ".join(str(error).split())
        raise PolicyError(f"{model_dir}: transformers knows no such model: {said}") from error
    first = {id(tensor): name for name, tensor in untied(model).items()}
    state = {name: first[id(one)] for name, one in model.state_dict(keep_vars=True).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in stored(model).items()}
    twins = {name: twin for name, twin in state.items() if name != twin}
    return shapes, twins, further_layers(model.config.get_text_config().to_dict())

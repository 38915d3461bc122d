"""Opens the vLLM engine on a tiny model for tests, where vLLM is installed (`make test-vllm`)."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.vllm.core import CPU_BUILD, VllmSettings, version_of
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support import models
from tests.support.device import COARSE, DEVICE, DTYPE, LORA_DTYPE, ON_GPU, ROUNDING
from tests.support.engine_contract import Decode, Subject

NOT_INSTALLED = "vllm is not installed: make test-vllm"
CONTEXT_TOKENS = 256
SETTINGS = VllmSettings(dtype=DTYPE, sleep=not ON_GPU)  # type: ignore[arg-type]
"""On a GPU a process has one engine that sleeps: `test_engine_vllm_sleep.py`."""


BUILDERS: dict[str, Callable[..., Path]] = {
    "qwen2": partial(models.make_qwen2, scale=8.0),
    "qwen3_moe": partial(models.make_qwen3_moe, scale=8.0, head_dim=32),
    "glm4_moe": partial(models.make_glm4_moe, scale=8.0, head_dim=32),
}
"""Models of heads that vLLM has kernels for, with wide logits. The mixtures' experts are 48 wide,
which is no multiple of what its kernels on a CPU want."""


def need_vllm() -> None:
    """Skip where vLLM is not installed, or its build is for another device."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make test-gpu" if ON_GPU else NOT_INSTALLED)
    if bool(version_of(CPU_BUILD)) == ON_GPU:
        pytest.skip(f"this build of vllm is not for {DEVICE}")


def open_vllm(model_dir: Path, settings: VllmSettings = SETTINGS, **options: Any) -> Any:
    """A VllmEngine on one thread; what vLLM's imports warn of is not ours."""
    from dora_pipe.producers.engines.vllm.engine import VllmEngine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return VllmEngine(model_dir, threads=1, settings=settings, **options)


@contextmanager
def vllm_subject(folder: Path, kind: str = "qwen2", **changes: Any) -> Iterator[Subject]:
    """The vLLM engine under contract, with two policies in a store of their own.

    Engines live until the end: one that is closed takes with it what all of a process share.
    """
    directories = [BUILDERS[kind](folder / f"seed{seed}", seed, **changes) for seed in (0, 1)]
    with stored_subject("vllm", folder, directories, partial(open_vllm, directories[0])) as subject:
        yield subject


@contextmanager
def stored_subject(
    name: str,
    folder: Path,
    directories: Sequence[Path],
    opener: Callable[..., Engine],
    *,
    ahead: bool = False,
) -> Iterator[Subject]:
    """An engine under contract whose policies are these two models; it is opened with the first."""
    store = PolicyStore(folder / "policies")
    manifests = [import_model(store, directory)[0] for directory in directories]
    opened: list[Engine] = []
    first, second = ((store.weights_path(m.digest), m.digest) for m in manifests)

    def open_engine(
        *, slots: int, context_tokens: int = CONTEXT_TOKENS, decode: Decode | None = None
    ) -> Engine:
        engine = opener(slots=slots, context_tokens=context_tokens, decode=decode)
        engine.load(first[0], version=0, digest=first[1])
        opened.append(engine)
        return engine

    yield Subject(
        name=name,
        open=open_engine,
        vocabulary=models.QWEN2_VOCABULARY,
        policies=(first, second),
        rounding=ROUNDING,
        coarse=COARSE,
        ahead=ahead,
    )
    _close(opened)


def _close(engines: Sequence[Engine]) -> None:
    """As each engine ends, vLLM goes through all objects of the process for garbage, which takes
    two seconds; here it does once for all."""
    with patch("gc.collect"):
        for engine in engines[1:]:
            engine.close()
    for engine in engines[:1]:
        engine.close()


@contextmanager
def vllm_opener(directory: Path, *, lora_rank: int) -> Iterator[Callable[..., Engine]]:
    """Opens engines for adapters: one for each size, which is given again without any version.

    An engine takes seconds to open, and engines live until the end (see `vllm_subject`).
    """
    opened: dict[tuple[int, int], Engine] = {}

    def open_engine(*, slots: int, most: int) -> Engine:
        sizes = (slots, most)
        if sizes not in opened:
            opened[sizes] = open_vllm(
                directory,
                replace(SETTINGS, dtype=LORA_DTYPE),  # type: ignore[arg-type]
                slots=slots,
                context_tokens=CONTEXT_TOKENS,
                lora_rank=lora_rank,
                versions_resident=most,
            )
        engine = opened[sizes]
        assert not engine.active
        for version in range(10):
            engine.drop(version)
        return engine

    yield open_engine
    _close([*opened.values()])

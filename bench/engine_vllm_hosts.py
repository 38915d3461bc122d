"""Opens vLLM for `engine_lora`, in process and as servers, on the same random weights.

A server takes half a minute to start: there is one for each number of adapters, with as many slots
as the largest batch, and the engines of that number follow each other on it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from dora_pipe.bench.dataplane.procfs import tree_cpu_s
from dora_pipe.bench.engine import CONTEXT_TOKENS
from dora_pipe.bench.engine_lora import load_adapters
from dora_pipe.bench.engine_vllm import write_model


class _OnFiles:
    """What both have in common: a model directory, and the digest of its weights."""

    def __init__(self, folder: Path) -> None:
        """`folder` is there. Needs vLLM. Raises ConfigError without it."""
        from dora_pipe.producers.engines.torch.weights import read_tensors, weight_files
        from dora_pipe.producers.engines.vllm import core as vllm_core

        vllm_core.prepare(threads=1)
        self._model = write_model(folder / "model")
        (self._weights,) = weight_files(self._model)
        _, self._digest = read_tensors([self._weights])

    def merged(self, rows: int) -> Any:
        """See Hosts."""
        engine = self._open(rows, lora_rank=0, versions_resident=1)
        engine.load(self._weights, version=0, digest=self._digest)
        return engine

    def hosting(self, rows: int, resident: int, rank: int) -> Any:
        """See Hosts."""
        engine = self._open(rows, lora_rank=rank, versions_resident=resident)
        engine.load(self._weights, version=0, digest=self._digest)
        engine.drop(0)
        load_adapters(engine, resident, rank, base=self._digest)
        return engine

    def _open(self, rows: int, *, lora_rank: int, versions_resident: int) -> Any:
        raise NotImplementedError


class VllmHosts(_OnFiles):
    """vLLM in this process."""

    def server_cpu_s(self, engine: Any) -> float:
        """There are none."""
        return 0.0

    def _open(self, rows: int, *, lora_rank: int, versions_resident: int) -> Any:
        from dora_pipe.producers.engines.vllm.engine import VllmEngine

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what vLLM imports
            return VllmEngine(
                self._model,
                slots=rows,
                context_tokens=CONTEXT_TOKENS,
                threads=1,
                lora_rank=lora_rank,
                versions_resident=versions_resident,
            )


class ServerHosts(_OnFiles):
    """vLLM as servers, until `close`."""

    def __init__(self, folder: Path, *, slots: int) -> None:
        """`slots` is the largest number of rows that is asked for."""
        super().__init__(folder)
        self._slots = slots
        self._servers: dict[tuple[int, int], Any] = {}
        self._of: dict[int, Any] = {}
        """The server of an engine, by its id()."""

    def server_cpu_s(self, engine: Any) -> float:
        """See Hosts."""
        return tree_cpu_s(self._of[id(engine)].pid)

    def _open(self, rows: int, *, lora_rank: int, versions_resident: int) -> Any:
        from dora_pipe.producers.engines.vllm.core import VllmSettings
        from dora_pipe.producers.engines.vllm.process import ServerProcess
        from dora_pipe.producers.engines.vllm.server import VllmServerEngine

        sizes: dict[str, Any] = {"lora_rank": lora_rank, "versions_resident": versions_resident}
        kind = (lora_rank, versions_resident)
        if kind not in self._servers:
            self._servers[kind] = ServerProcess.start(
                self._model,
                VllmSettings(),
                slots=self._slots,
                context_tokens=CONTEXT_TOKENS,
                threads=1,
                **sizes,
            )
        server = self._servers[kind]
        engine = VllmServerEngine(
            self._model, slots=rows, context_tokens=CONTEXT_TOKENS, address=server.address, **sizes
        )
        self._of[id(engine)] = server
        return engine

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.close()

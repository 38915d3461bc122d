"""vLLM without its prefix cache and with it, in this process or as servers, for the bench of turns;
decides nothing.

What was prefilled is what vLLM says that it computed of prompts: whole blocks of them are found.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dora_pipe.bench.dataplane.procfs import tree_cpu_s
from dora_pipe.bench.engine_turns import Side, Sides
from dora_pipe.bench.engine_vllm import write_model
from dora_pipe.producers.engines.vllm.core import VllmSettings, token_kv_values
from dora_pipe.store.model_dir import read_config
from dora_pipe.store.safetensors_file import read_manifest

_FLOAT32_BYTES = 4


def vllm_sides(folder: Path, *, server: bool) -> Sides:
    """Both kinds on the same random weights, written below `folder`. Needs vLLM."""
    return partial(_sides, folder, _served if server else _in_process)


@contextmanager
def _sides(
    folder: Path, open_side: Any, rows: int, context_tokens: int, kept_tokens: int
) -> Iterator[Sequence[Side]]:
    from dora_pipe.producers.engines.torch.weights import weight_files

    with ExitStack() as undo:
        place = Path(undo.enter_context(TemporaryDirectory(dir=folder)))
        model = write_model(place, context_tokens=context_tokens)
        (weights,) = weight_files(model)
        digest = read_manifest(weights).digest
        token_bytes = token_kv_values(read_config(model)) * _FLOAT32_BYTES
        kv_gb = kept_tokens * token_bytes / 2**30
        found = []
        for keeps in (False, True):
            settings = VllmSettings(prefix_cache=keeps, kv_gb=kv_gb)
            side = open_side(undo, model, settings, rows, context_tokens)
            side.engine.load(weights, version=0, digest=digest)
            found.append(side)
        yield found


def _in_process(
    undo: ExitStack, model: Path, settings: VllmSettings, rows: int, context_tokens: int
) -> Side:
    from dora_pipe.producers.engines.vllm.engine import VllmEngine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        engine = VllmEngine(
            model, slots=rows, context_tokens=context_tokens, threads=1, settings=settings
        )
    undo.callback(engine.close)
    return Side(engine=engine)


def _served(
    undo: ExitStack, model: Path, settings: VllmSettings, rows: int, context_tokens: int
) -> Side:
    from dora_pipe.producers.engines.vllm.process import ServerProcess
    from dora_pipe.producers.engines.vllm.server import VllmServerEngine

    process = ServerProcess.start(
        model, settings, slots=rows, context_tokens=context_tokens, threads=1
    )
    undo.callback(process.close)
    engine = VllmServerEngine(
        model, slots=rows, context_tokens=context_tokens, address=process.address
    )
    undo.callback(engine.close)
    return Side(engine=engine, others_cpu_s=partial(tree_cpu_s, process.pid))

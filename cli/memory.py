"""`memory`: estimate GPU memory and disk of a run, and find keys that make it fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from dora_pipe.cli.options import JsonOption, OverrideOption
from dora_pipe.cli.output import emit_json, emit_line, emit_table
from dora_pipe.config.load import config_file_in, laid_over, load_config
from dora_pipe.config.model import Config
from dora_pipe.launch import memory
from dora_pipe.launch.memory import Gpus, Parts, Placement, with_keys
from dora_pipe.launch.model_shape import ModelShape, model_shape
from dora_pipe.producers.engines.base import need_positions

QUANTIZED: Final = (
    "the files are quantized (quantization_config): a run begins with float32 or bfloat16 ones"
)


class EstimateRow(NamedTuple):
    """Bytes of one item in total, and on one GPU at most."""

    what: str
    bytes: int
    per_gpu: int | None = None
    fits: bool | None = None


class Estimate(NamedTuple):
    """Sizes, notes, keys that make a run fit, and items that do not fit."""

    rows: list[EstimateRow]
    notes: list[str]
    keys: dict[str, Any]
    misfits: list[str]

    @property
    def good(self) -> bool:
        return not self.misfits and all(row.fits is not False for row in self.rows)


def memory_command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model directory, or a run's TOML file.")
    ],
    gpus: Annotated[str, typer.Option(metavar="NxGB", help="Check these GPUs, e.g. 8x80.")] = "",
    override: OverrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate the GPU memory and disk of a run, and the keys that make it fit."""
    room = memory.parse_gpus(gpus) if gpus else None
    config = _config_of(model, override or ())
    folder = Path(config.model.path)
    need_positions(folder, config.workers.max_model_len)
    shape = model_shape(folder)
    result = estimate(shape, config, room)
    if as_json:
        emit_json({"parameters": shape.parameters, "family": shape.family})
        for row in result.rows:
            emit_json(row._asdict())
        emit_json({"set": result.keys, "fail": result.misfits, "notes": result.notes})
    else:
        emit_line(f"{folder}: {shape.family}, {shape.parameters / 1e9:.3g} billion parameters")
        cells = [(row.what, _size(row.bytes), _size(row.per_gpu), row.fits) for row in result.rows]
        emit_table(("what", "bytes", "per GPU", "fits"), cells)
        lines = [f"note: {line}" for line in result.notes]
        lines += [f"set: {key} = {json.dumps(value)}" for key, value in result.keys.items()]
        for line in [*lines, *(f"fail: {line}" for line in result.misfits)]:
            emit_line(line)
    if not result.good:
        raise typer.Exit(1)


def _config_of(model: Path, overrides: Sequence[str]) -> Config:
    """Read a TOML file or a run directory; a model directory gets vLLM, a GPU and defaults."""
    if (file := config_file_in(model)).is_file():
        return load_config(file, overrides)
    table = {
        "run": {"name": "estimate", "steps": 1},
        "model": {"path": str(model.resolve())},
        "task": {"kind": "arithmetic"},
        "workers": {"engine": "vllm"},
        "trainer": {"device": "cuda"},
    }
    return laid_over(table, overrides, Path.cwd())


def estimate(shape: ModelShape, config: Config, gpus: Gpus | None) -> Estimate:
    """Estimate a configuration on these GPUs. Raises UsageError if it names others."""
    count = max([*config.workers.gpus, *config.trainer.gpus, -1]) + 1
    count = gpus.count if gpus else max(count, config.workers.count + config.trainer.ranks)
    placement = memory.placement_of(config, count)
    rows = list(_rows(shape, config, placement, gpus))
    misfits = [QUANTIZED] if shape.quantized else []
    estimate = Estimate(rows, list(_notes(shape, config, placement, gpus)), {}, misfits)
    if gpus is not None:
        _advise(estimate, shape, config, placement, gpus)
    return estimate


def _rows(
    shape: ModelShape, config: Config, placement: Placement, gpus: Gpus | None
) -> Iterator[EstimateRow]:
    usable = gpus.usable if gpus else None
    worker = memory.worker_parts(shape, config) if placement.workers else {}
    yield from _part_rows("worker", worker, placement.workers, placement.per_gpu)
    together = placement.per_gpu * sum(worker.values())
    if worker:
        all_of = placement.workers * sum(worker.values())
        fits = None if usable is None else together <= usable
        yield EstimateRow("worker: total", all_of, together, fits)
    ranks = config.trainer.ranks
    trainer = memory.state_parts(shape, config) | memory.pass_parts(shape, config)
    trainer["an update instead of a pass"] = memory.update_bytes(shape, config)
    yield from _part_rows("trainer", trainer, ranks, 1)
    peak, used = memory.trainer_bytes(shape, config), together if placement.shared else 0
    fits = None if usable is None else ranks <= placement.trainer_gpus and peak + used <= usable
    yield EstimateRow("trainer: peak", ranks * peak, peak, fits)
    for what, size in memory.disk_parts(shape, config).items():
        yield EstimateRow(f"disk: {what}", size)


def _part_rows(of: str, parts: Parts, count: int, per_gpu: int) -> Iterator[EstimateRow]:
    for what, size in parts.items():
        if size:
            yield EstimateRow(f"{of}: {what}", count * size, per_gpu * size)


def _notes(
    shape: ModelShape, config: Config, placement: Placement, gpus: Gpus | None
) -> Iterator[str]:
    if shape.mixture:
        yield "a mixture of experts: weights count all experts, activations those of a token"
    if not placement.workers:
        yield "workers compute on the CPU: their memory is not counted"
    elif gpus is not None:
        slots = memory.slots_that_fit(shape, config, gpus.usable // placement.per_gpu)
        context = config.workers.max_model_len
        yield f"a worker has room for at most {slots} slots of {context} tokens"
    if placement.shared:
        yield "trainer and workers share a GPU: the trainer gets what the workers leave"
    if config.teacher.path:
        yield "the teacher is not counted"


def _advise(
    estimate: Estimate, shape: ModelShape, config: Config, placement: Placement, gpus: Gpus
) -> None:
    keys, misfits, changed, used = estimate.keys, estimate.misfits, config, 0
    if placement.workers:
        worker = memory.worker_keys(shape, config, gpus, placement.per_gpu)
        if worker is None:
            misfits.append("no key makes a worker fit: larger or more GPUs, or a smaller model")
        keys.update(worker or {})
        changed = with_keys(config, keys)
        placement = memory.placement_of(changed, gpus.count)
        if placement.shared:
            used = placement.per_gpu * sum(memory.worker_parts(shape, changed).values())
        elif not changed.workers.gpus:
            taken = config.trainer.gpus or range(placement.trainer_gpus)
            free = [number for number in range(gpus.count) if number not in taken]
            keys["workers.gpus"] = free[: placement.worker_gpus]
    trainer = memory.trainer_keys(shape, config, gpus.usable - used, placement.trainer_gpus)
    if trainer is None:
        misfits.append("no key makes the trainer fit: more GPUs, or an adapter (lora.rank)")
    keys.update(trainer or {})
    if config.trainer.device == "cpu":
        keys["trainer.device"] = "cuda"


def _size(bytes_: int | None) -> str:
    if bytes_ is None:
        return ""
    power = min(4, max(1, (len(str(bytes_)) - 1) // 3))
    return f"{bytes_ / 1000**power:.3g} {'KMGT'[power - 1]}B"

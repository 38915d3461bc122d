"""`doctor --model`: what a run takes of GPUs that need not be here, and which keys make it fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from dora_pipe.cli.output import emit_json, emit_line, emit_table
from dora_pipe.config.load import laid_over, load_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.memory_estimate import (
    Gpus,
    MemoryPart,
    Placement,
    host_trainer_bytes,
    host_worker_parts,
    kv_token_bytes,
    parse_gpus,
    parts_bytes,
    pass_parts,
    placement_of,
    slots_that_fit,
    state_parts,
    trainer_bytes,
    update_bytes,
    version_parts,
    worker_parts,
)
from dora_pipe.launch.memory_fit import (
    SLOTS_LEAST,
    Fits,
    fits,
    parallel_keys,
    trainer_keys,
    with_keys,
    worker_keys,
    zero_ways,
)
from dora_pipe.launch.model_shape import ModelShape, model_shape
from dora_pipe.producers.engines.base import need_positions
from dora_pipe.producers.engines.torch.causal_lm import FAMILIES
from dora_pipe.store.model_dir import read_config, weights_elements

MIXTURE: Final = "a mixture of experts: all are in the weights, those of a token in activations"

BY_DEFAULT: Final = (
    'without --config: workers.engine = "vllm", trainer.device = "cuda" and the defaults of all'
    " other keys"
)

QUANTIZED: Final = (
    "the files are quantized (quantization_config): a run begins with float32 or bfloat16 ones"
)


class EstimateRow(NamedTuple):
    """One thing that is held: by all places together, and on one GPU at most."""

    what: str
    bytes: int | None
    per_gpu: int | None = None
    fits: Fits = ""


class Way(NamedTuple):
    """A trainer that could be set: what it takes of each GPU, and of the host's memory."""

    keys: str
    per_gpu: int
    fits: Fits
    checkpointed: int
    """With `trainer.gradient_checkpointing`."""
    fits_then: Fits
    host: int


class Estimate(NamedTuple):
    """All that is printed."""

    rows: list[EstimateRow]
    passes: list[EstimateRow]
    ways: list[Way]
    notes: list[str]
    keys: dict[str, Any]
    """To be set, where something does not fit."""
    misfits: list[str]
    """What no key makes fit."""

    @property
    def good(self) -> bool:
        """Whether it fits as it is configured."""
        return not self.misfits and not any(row.fits == "no" for row in self.rows)


def print_estimate(
    model: Path | None, gpus: str, config: Path | None, overrides: Sequence[str], *, as_json: bool
) -> bool:
    """Print it; whether what is configured fits. Raises DoraError for what cannot be read."""
    room = parse_gpus(gpus) if gpus else None
    if config is not None:
        changed = [f"model.path={json.dumps(str(model.resolve()))}"] if model else []
        wanted = load_config(config, [*overrides, *changed])
    elif model is not None:
        wanted = _by_default(model, overrides)
    else:
        raise UsageError(
            "--gpus asks whether a model fits, and there is none",
            hint="--model DIR, or --config FILE whose model.path is one",
        )
    folder = Path(wanted.model.path)
    need_positions(folder, wanted.workers.context_tokens)
    shape = model_shape(read_config(folder), weights_elements(folder))
    found = estimate(shape, wanted, room)
    if config is None:
        found.notes.insert(0, BY_DEFAULT)
    if as_json:
        _print_json(shape, found)
    else:
        _print(folder, shape, room, found)
    return found.good


def _by_default(model: Path, overrides: Sequence[str]) -> Config:
    """A run with vLLM and a trainer on a GPU, and the defaults of all other keys."""
    table = {
        "run": {"name": "estimate", "steps": 1},
        "model": {"path": str(model.resolve())},
        "task": {"kind": "arithmetic"},
        "workers": {"engine": "vllm"},
        "trainer": {"device": "cuda"},
    }
    return laid_over(table, overrides, Path.cwd())


def estimate(shape: ModelShape, config: Config, gpus: Gpus | None) -> Estimate:
    """What the configuration takes, on these GPUs. Raises UsageError where it names others."""
    place = placement_of(config, gpus.count if gpus else _wanted_gpus(config))
    usable = gpus.usable if gpus else None
    workers = list(_worker_rows(shape, config, place, usable))
    left = None
    if usable is not None:
        there = place.per_gpu * parts_bytes(worker_parts(shape, config)) if place.shared else 0
        left = max(0, usable - there)
    found = Estimate(
        rows=[*workers, *_trainer_rows(shape, config, place, left), *_version_rows(shape, config)],
        passes=_pass_rows(shape, config),
        ways=_ways(shape, config, place, left),
        notes=list(_notes(shape, config, place, usable)),
        keys={},
        misfits=[QUANTIZED] if shape.quantized else [],
    )
    if gpus is not None:
        _advise(found, shape, config, place, gpus)
    return found


def _wanted_gpus(config: Config) -> int:
    """As many as the keys speak of, where nobody says how many there are."""
    ranks = config.trainer.ranks
    named = max([*config.workers.gpus, *config.trainer.gpus, -1]) + 1
    return max(named, config.workers.count + ranks)


def _worker_rows(
    shape: ModelShape, config: Config, place: Placement, usable: int | None
) -> Iterator[EstimateRow]:
    if not place.workers:
        count = config.workers.count
        for part in host_worker_parts(shape, config) if count else ():
            yield EstimateRow(f"worker, host: {part.what}", count * part.bytes)
        return
    parts = worker_parts(shape, config)
    for part in [*parts, MemoryPart("in all", parts_bytes(parts))]:
        in_all = part.what == "in all"
        per_gpu = place.per_gpu * part.bytes
        found = fits(per_gpu, usable) if in_all else ""
        yield EstimateRow(f"worker: {part.what}", place.workers * part.bytes, per_gpu, found)


def _trainer_rows(
    shape: ModelShape, config: Config, place: Placement, left: int | None
) -> Iterator[EstimateRow]:
    ranks = _ranks(config)
    for part in [*state_parts(shape, config), *pass_parts(shape, config)]:
        yield EstimateRow(f"trainer: {part.what}", ranks * part.bytes, part.bytes)
    update = update_bytes(shape, config)
    if update:
        yield EstimateRow(
            "trainer: a copy, in place of the pass, in an update", ranks * update, update
        )
    peak = trainer_bytes(shape, config)
    found = fits(peak, left)
    if found and ranks > place.trainer_gpus:
        found = "no"
    yield EstimateRow("trainer: at most at one time", ranks * peak, peak, found)
    yield EstimateRow(
        "trainer, host: when it starts or offloads", host_trainer_bytes(shape, config)
    )


def _ranks(config: Config) -> int:
    return config.trainer.ranks if config.trainer.kind == "deepspeed" else 1


def _version_rows(shape: ModelShape, config: Config) -> Iterator[EstimateRow]:
    for part in version_parts(shape, config):
        if part.bytes:
            yield EstimateRow(f"store: {part.what}", part.bytes)


def _pass_rows(shape: ModelShape, config: Config) -> list[EstimateRow]:
    """What keys make of one pass, on one GPU; the last column names those that are set."""
    rows = []
    for key, values, part in (
        ("gradient_checkpointing", (False, True), "activations"),
        ("packing", (False, True), "mask"),
        ("mlp_chunk_tokens", (0, "auto"), "activations"),
        ("head_chunk_tokens", (0, "auto"), "head"),
    ):
        for value in values:
            changed = with_keys(config, {f"trainer.{key}": value})
            parts = pass_parts(shape, changed)
            bytes_ = sum(one.bytes for one in parts if one.what.startswith(part))
            said = f"{part}, trainer.{key} = {json.dumps(value)}"
            rows.append(EstimateRow(said, bytes_))
    return rows


def _ways(shape: ModelShape, config: Config, place: Placement, left: int | None) -> list[Way]:
    """The torch trainer, and DeepSpeed over the GPUs that are not workers'."""
    torch = {"kind": "torch", "ranks": 1, "offload": "none", "dtype": "float32", "zero_stage": 2}
    alone = {f"trainer.{key}": value for key, value in torch.items()}
    alone["trainer.expert_parallel"] = 1
    found = []
    narrow = {**alone, "trainer.dtype": "bfloat16"}
    for keys in (alone, narrow, *zero_ways(config, place.trainer_gpus)):
        changed = with_keys(config, keys)
        plain, light = (
            trainer_bytes(shape, with_keys(changed, {"trainer.gradient_checkpointing": on}))
            for on in (False, True)
        )
        found.append(
            Way(
                keys=_way_name(keys),
                per_gpu=plain,
                fits=fits(plain, left),
                checkpointed=light,
                fits_then=fits(light, left),
                host=host_trainer_bytes(shape, changed),
            )
        )
    return found


def _way_name(keys: Mapping[str, Any]) -> str:
    kind, ranks, stage, dtype, offload = (
        keys[f"trainer.{key}"] for key in ("kind", "ranks", "zero_stage", "dtype", "offload")
    )
    if kind == "torch":
        return f"torch, {dtype}"
    said = f"deepspeed, {ranks} ranks, zero_stage {stage}, {dtype}"
    return said if offload == "none" else f"{said}, offload {offload}"


def _notes(
    shape: ModelShape, config: Config, place: Placement, usable: int | None
) -> Iterator[str]:
    if shape.mixture:
        engine = "too" if shape.family in FAMILIES else "does not"
        yield f"{MIXTURE}; both trainers and vLLM take it, the own engine {engine}"
    if place.workers:
        token = kv_token_bytes(shape, config)
        yield f"a token in a KV cache of vLLM has {_size(token)}"
    if place.workers and usable is not None:
        slots = slots_that_fit(shape, config, usable // place.per_gpu)
        context = config.workers.context_tokens
        yield f"a worker has room for {slots} slots of {context} tokens at most (workers.slots)"
    if place.shared:
        yield "trainer and workers share a GPU: the trainer has what the workers leave"
    if place.workers and config.lora.rank == 0:
        yield "a worker holds one version; adapters (lora.rank) are several beside one base"
    if config.teacher.path:
        yield "the teacher is not counted: it is another model beside the trainer's"


def _advise(
    found: Estimate, shape: ModelShape, config: Config, place: Placement, gpus: Gpus
) -> None:
    """Keys that make it fit, and what none does."""
    keys, misfits, usable = found.keys, found.misfits, gpus.usable
    if place.workers:
        worker, place = _worker_advice(shape, config, place, gpus)
        if worker is None:
            misfits.append("no key makes a worker fit (larger GPUs, more of them, a smaller model)")
        keys.update(worker or {})
        changed = with_keys(config, keys)
        if not changed.workers.gpus and not place.shared:
            first = place.trainer_gpus
            keys["workers.gpus"] = list(range(first, first + place.worker_gpus))
    there = place.per_gpu * parts_bytes(worker_parts(shape, with_keys(config, keys)))
    left = max(0, usable - (there if place.shared else 0))
    trainer = trainer_keys(shape, config, left, place.trainer_gpus)
    if trainer is None:
        misfits.append("no key makes the trainer fit: more GPUs, or adapters (lora.rank)")
    keys.update(trainer or {})
    kind, device = config.trainer.kind, config.trainer.device
    if device == "cpu" or (device == "auto" and keys.get("trainer.kind", kind) == "torch"):
        keys["trainer.device"] = "cuda"


def _worker_advice(
    shape: ModelShape, config: Config, place: Placement, gpus: Gpus
) -> tuple[dict[str, Any] | None, Placement]:
    """Keys of a worker, and who has which GPUs then: one that holds some slots, else several, else
    one that holds any."""
    room = gpus.usable // place.per_gpu
    one = worker_keys(shape, config, room, slots_least=SLOTS_LEAST)
    if one is not None:
        return one, place
    several = parallel_keys(shape, config, gpus)
    if several is not None:
        return several, placement_of(with_keys(config, several), gpus.count)
    return worker_keys(shape, config, room), place


def _print(folder: Path, shape: ModelShape, gpus: Gpus | None, found: Estimate) -> None:
    active = "" if shape.active == shape.parameters else f", {_count(shape.active)} for a token"
    emit_line(f"{folder}: {shape.family}, {_count(shape.parameters)} parameters{active}")
    if gpus:
        emit_line(
            f"{gpus.count} GPUs of {_size(gpus.size_bytes)}, {_size(gpus.usable)} to be filled"
        )
    emit_line()
    emit_table(
        ("what", "bytes", "per GPU", "fits"),
        [*map(_cells, found.rows)],
        title="as it is configured",
    )
    emit_line()
    emit_table(
        ("what", "bytes"), [_cells(row)[:2] for row in found.passes], title="of a pass, on one GPU"
    )
    columns = ("trainer", "per GPU", "fits", "checkpointed", "fits", "host")
    emit_line()
    emit_table(columns, [*map(_cells, found.ways)], title="other trainers")
    emit_line()
    for line in found.notes:
        emit_line(f"note: {line}")
    for key, value in found.keys.items():
        emit_line(f"set: {key} = {json.dumps(value)}")
    for line in found.misfits:
        emit_line(f"fail: {line}")


def _print_json(shape: ModelShape, found: Estimate) -> None:
    emit_json({"parameters": shape.parameters, "active": shape.active, "family": shape.family})
    for table in (found.rows, found.passes, found.ways):
        for row in table:
            emit_json(row._asdict())
    emit_json({"set": found.keys, "fail": found.misfits, "notes": found.notes})


def _cells(row: EstimateRow | Way) -> tuple[str, ...]:
    return tuple(one if isinstance(one, str) else _size(one) for one in row)


def _size(bytes_: int | None) -> str:
    """Three digits and a unit; nothing for nothing known."""
    if bytes_ is None:
        return ""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if bytes_ >= unit:
            return f"{bytes_ / unit:.3g} {name}"
    return f"{bytes_ / 1000:.3g} KB"


def _count(numbers: int) -> str:
    return f"{numbers / 1e9:.3g} billion" if numbers >= 1e9 else f"{numbers / 1e6:.3g} million"

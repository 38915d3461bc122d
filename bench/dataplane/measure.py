"""Phases of `bench dataplane`, one writer and one reader process each; as a program, one of them.

Each repeat measures the planes in turn, so other load affects a whole repeat.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated, Final
from uuid import uuid4

import typer

from dora_pipe.bench.dataplane.process import (
    GROUP_SIZE,
    PARTITIONS,
    READY,
    Assemble,
    Done,
    Inside,
    Publish,
)
from dora_pipe.bench.support import Child, emit_figures, reply, scratch, task_of
from dora_pipe.bus import open_bus
from dora_pipe.bus.bus import TopicSpec
from dora_pipe.cli.options import JsonOption
from dora_pipe.core.errors import DoraError, ResourceError, UsageError
from dora_pipe.core.system.console import complain, say
from dora_pipe.schemas.topics import Topics

TOKENS: Final = (256, 2_048, 16_384, 65_536)
BATCH_GROUPS_MAX: Final = 16
BATCH_TOKENS: Final = 1024 * 1024
"""Groups of a batch at full load: this number, or as many as hold `BATCH_TOKENS`."""
LOAD: Final = 1 / 10
LATENCIES_MIN: Final = 200
LATENCY_STRETCH: Final = 4
"""Trajectories for latency, and maximum stretch of `seconds`."""
COLLECT_AFTER: Final = (50_000, 20, 100)
MODULE: Final = "dora_pipe.bench.dataplane.measure"
KEEPS: Final[Mapping[str, str]] = {"kafka": "acks=all", "sqlite": "fsync"}
"""Durability guarantee per plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneFigure:
    """Median of one log; 1 MB is 10^6 stored bytes.

    Throughput and CPU time are at full load, latency at a tenth of it. `spread` is the range.
    """

    plane: str
    keeps: str
    tokens: int
    bytes: int
    trajectories_per_s: float
    spread: str
    mb_per_s: float
    cpu_us: float
    p50_ms: float
    p50_spread: str
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    kafka: str
    tokens: Sequence[int]
    seconds: float
    repeats: int
    folder: Path


Phase = tuple[Done, Done]


def command(
    bus: Annotated[str, typer.Option(help="kafka://HOST:PORT[,..]; without it SQLite alone.")] = "",
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens per trajectory; repeatable.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Records per phase.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions for medians.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Measure trajectories from a worker's process into a trainer's batch on every log."""
    with scratch() as folder:
        setup = Setup(
            kafka=bus, tokens=tokens or TOKENS, seconds=seconds, repeats=repeats, folder=folder
        )
        emit_figures(bench_dataplane(setup, say), as_json=as_json)


def bench_dataplane(setup: Setup, say: Callable[[str], None]) -> list[PlaneFigure]:
    """Measure every length. Raises UsageError, BusError, ResourceError."""
    if setup.repeats < 1 or setup.seconds <= 0 or not setup.tokens:
        raise UsageError("--tokens, repetitions and time must be positive")
    if setup.kafka and not _brokers(setup.kafka):
        raise UsageError(f"{setup.kafka!r} is not a broker", hint="kafka://HOST:PORT[,HOST:PORT]")
    figures = []
    planes = {"kafka": setup.kafka} if setup.kafka else {}
    planes["sqlite"] = "sqlite:"
    for tokens in setup.tokens:
        say(f"{tokens} tokens")
        rounds: dict[str, list[tuple[Phase, Phase]]] = {name: [] for name in planes}
        for _ in range(setup.repeats):
            for name, address in planes.items():
                rounds[name].append(_round(setup, address, tokens))
        figures += [plane_figure(name, tokens, phases) for name, phases in rounds.items()]
    return figures


def _round(setup: Setup, address: str, tokens: int) -> tuple[Phase, Phase]:
    full = _phase(setup, address, tokens, batch_of(tokens), setup.seconds, per_s=0.0)
    per_s = rate(full) * LOAD
    seconds = min(max(setup.seconds, LATENCIES_MIN / per_s), LATENCY_STRETCH * setup.seconds)
    return full, _phase(setup, address, tokens, 0, seconds, per_s=per_s)


def batch_of(tokens: int) -> int:
    groups = BATCH_TOKENS // (tokens * GROUP_SIZE)
    return GROUP_SIZE * max(1, min(BATCH_GROUPS_MAX, groups))


def _phase(
    setup: Setup, address: str, tokens: int, batch: int, seconds: float, *, per_s: float
) -> Phase:
    run = f"bench-{uuid4().hex[:12]}"
    blobs = setup.folder / f"{run}.blobs"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, blobs, ignore_errors=True)
        if address == "sqlite:":
            path = setup.folder / f"{run}.sqlite"
            stack.callback(_remove, path)
            address = f"sqlite:{path}"
        stack.enter_context(_topic(address, Topics(run).trajectories))
        write = Publish(
            address=address, run=run, tokens=tokens, seconds=seconds, per_s=per_s, blobs=str(blobs)
        )
        read = Assemble(address=address, run=run, batch=batch, blobs=str(blobs))
        writer, reader = (stack.enter_context(Child(MODULE, task)) for task in (write, read))
        for child in (writer, reader):
            if child.answer(str) != READY:
                raise ResourceError("a process of the benchmark is not ready")
        reader.tell("go")
        writer.tell("go")
        published = writer.answer(Done)
        reader.tell(str(published.records))
        return published, reader.answer(Done)


def rate(phase: Phase) -> float:
    """Return records per second over both processes."""
    published, assembled = phase
    return assembled.records / max(1e-9, (assembled.end_ns - published.start_ns) / 1e9)


def plane_figure(plane: str, tokens: int, rounds: Sequence[tuple[Phase, Phase]]) -> PlaneFigure:
    fulls = [full for full, _ in rounds]
    rates = [rate(full) for full in fulls]
    size = statistics.median(read.bytes / read.records for _, read in fulls)
    latencies = [latencies_ms(light) for _, light in rounds]
    p50s = [percentile(latency, 50) for latency in latencies]
    return PlaneFigure(
        plane=plane,
        keeps=KEEPS[plane],
        tokens=tokens,
        bytes=round(size),
        trajectories_per_s=statistics.median(rates),
        spread=spread(rates, digits=0),
        mb_per_s=statistics.median(rates) * size / 1e6,
        cpu_us=statistics.median(
            (write.cpu_s + read.cpu_s) / read.records * 1e6 for write, read in fulls
        ),
        p50_ms=statistics.median(p50s),
        p50_spread=spread(p50s, digits=2),
        p99_ms=statistics.median(percentile(latency, 99) for latency in latencies),
    )


def latencies_ms(phase: Phase) -> list[float]:
    pairs = zip(phase[0].moments, phase[1].moments, strict=True)
    return [(batched - finished) / 1e6 for finished, batched in pairs]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile: ``percentile([3.0, 1.0, 2.0], 50) == 2.0``."""
    return sorted(values)[ceil(percent / 100 * len(values)) - 1]


def spread(values: Sequence[float], *, digits: int) -> str:
    """Return the range: ``spread([1.0, 3.0], digits=0) == "1-3"``."""
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


@contextmanager
def _topic(address: str, name: str) -> Iterator[None]:
    bus = open_bus(address)
    try:
        bus.create([TopicSpec(name=name, partitions=PARTITIONS)])
    finally:
        bus.close()
    yield
    if brokers := _brokers(address):
        from kafka import KafkaAdminClient

        admin = KafkaAdminClient(bootstrap_servers=brokers.split(","))
        try:
            admin.delete_topics([name])
        finally:
            admin.close()


def _brokers(address: str) -> str:
    kind, _, rest = address.partition("://")
    return rest.strip("/") if kind == "kafka" else ""


def _remove(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


def run_task(task: Publish | Assemble, inside: Inside) -> Done:
    from dora_pipe.bench.dataplane.assemble import assemble
    from dora_pipe.bench.dataplane.publish import publish

    return publish(task, inside) if isinstance(task, Publish) else assemble(task, inside)


def main() -> int:
    gc.set_threshold(*COLLECT_AFTER)
    try:
        task: Publish | Assemble = task_of(Publish | Assemble)  # type: ignore[arg-type]
        reply(run_task(task, Inside()))
    except DoraError as error:
        complain(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

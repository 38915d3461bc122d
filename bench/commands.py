"""`dora-pipe bench`: measurements of one part, side by side in one process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_rows
from dora_pipe.core.console import RUNS, say
from dora_pipe.core.errors import UsageError

VLLM_ROWS = (1, 16, 64)
DEMO = "demo"
RESIDENT_ROWS = (1, 16, 64)
TURN_ROWS = (16, 64)
RECORD_BYTES = (2_000, 65_536, 1_048_576)
AUDITED_TOKENS = (2_048, 16_384)
WEIGHTS_WORKERS = (1, 4, 8)
STORE_MB_S = (0, 200)
WAY_MB_S = 200
TOKENS = (30, 256, 2_048, 16_384)
RESTART = (20_000, 100_000)
TURN_WORKERS = (512,)
TURN_SLOTS = 200
PLAN_WORKERS = (250, 500, 1_000, 2_000, 4_000, 10_000)


def engine(
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows of the running batch; may be repeated.")
    ] = None,
    engine: Annotated[str, typer.Option(help="torch, vllm or vllm-server.")] = "torch",
    model: Annotated[
        str,
        typer.Option(
            help="demo; for vllm beside generate also tiny, 0.6B, 1.7B or 4B: Qwen3's shapes in "
            "bfloat16 with compiled graphs."
        ),
    ] = DEMO,
    resident: Annotated[
        list[int] | None,
        typer.Option(
            help="With so many LoRA versions resident, beside merged weights; may be repeated."
        ),
    ] = None,
    turns: Annotated[
        int,
        typer.Option(
            help="Episodes of so many turns: what kept prefixes save of the engine's prefill."
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Tokens per second of an engine by rows, beside `generate`: that of transformers for the own
    engine, vLLM's for vLLM; and of vLLM as a server, beside vLLM in process."""
    from dora_pipe.producers.engines.registry import need_engines

    need_engines([engine])
    if model != DEMO and (engine != "vllm" or turns or resident):
        raise UsageError(f"--model {model} is of vLLM beside generate", hint="--engine vllm alone")
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        found: Iterable[Any]
        if turns:
            found = _turn_figures(engine, Path(folder), rows or TURN_ROWS, turns)
        elif resident:
            found = _resident_figures(engine, Path(folder), rows or RESIDENT_ROWS, resident)
        else:
            found = _beside_generate(engine, Path(folder), rows, model)
        _emit_figures(found, as_json=as_json)


def bus(
    url: Annotated[
        list[str] | None, typer.Option(help="A log to measure beside memory and SQLite.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Per phase.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Records and bytes per second of every bus, and bytes of a worker's statuses."""
    from dora_pipe.bench.bus import bench_bus
    from dora_pipe.bench.status import bench_status

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        urls = ["memory:", f"sqlite:{folder}/bench.sqlite", *(url or ())]
        _emit_figures(bench_bus(urls, record_bytes=RECORD_BYTES, seconds=seconds), as_json=as_json)
    _emit_figures(bench_status(), as_json=as_json)


def audit(
    bus: Annotated[
        list[str] | None, typer.Option(help="A log to measure beside SQLite: kafka://HOST:PORT.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens per trajectory; may be repeated.")
    ] = None,
    trajectories: Annotated[int, typer.Option(min=1, help="Of each run.")] = 10_000,
    repeats: Annotated[int, typer.Option(min=1, help="Medians over so many.")] = 3,
    memory: Annotated[
        int, typer.Option(min=0, help="Also how memory grows in an audit of so many trajectories.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Audits of a run by every log: the first, a quick one, one from the index; and memory."""
    from dora_pipe.bench.audit import AuditFigure, MemoryFigure, bench_audit, bench_memory

    place = tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-")
    with place as folder:
        figures = bench_audit(
            [f"sqlite:{folder}/bench.sqlite", *(bus or ())],
            tokens=tokens or AUDITED_TOKENS,
            trajectories=trajectories,
            repeats=repeats,
        )
        names = [one.name for one in fields(AuditFigure)]
        emit_rows(names, [asdict(one) for one in figures], as_json=as_json)
        if memory:
            found = bench_memory(Path(folder), trajectories=memory)
            names = [one.name for one in fields(MemoryFigure)]
            emit_rows(names, [asdict(found)], as_json=as_json)


def codec(
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens per trajectory; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time and size of an encoded trajectory, beside pickle and raw arrays."""
    from dora_pipe.bench.codec import bench_codec

    _emit_figures(bench_codec(tokens or TOKENS), as_json=as_json)


def dataplane(
    bus: Annotated[
        str, typer.Option(help="kafka://HOST:PORT[,..]; without it SQLite and a pipe alone.")
    ] = "",
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens per trajectory; may be repeated.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Per phase.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Medians over so many.")] = 5,
    routes: Annotated[
        bool, typer.Option("--routes", help="With the experts of a mixture that tokens passed.")
    ] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Beside raw Kafka, Redis and TransferQueue.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Trajectories from a worker's hands into a trainer's batch, by every log beside a pipe."""
    from dora_pipe.bench.dataplane.measure import TOKENS as LENGTHS
    from dora_pipe.bench.dataplane.measure import Setup, bench_dataplane
    from dora_pipe.bench.dataplane.servers import wanted

    here, absent = wanted(bus) if peers else ([], {})
    for name, why in absent.items():
        say(f"without {name}: {why}")
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        setup = Setup(
            kafka=bus,
            tokens=tokens or LENGTHS,
            seconds=seconds,
            repeats=repeats,
            folder=Path(folder),
            routes=routes,
            layers=not (peers or routes),
            peers=here,
        )
        measured = bench_dataplane(setup, say)

    for figures in (measured.layers, measured.delays, measured.planes, measured.splits):
        if figures:
            _emit_figures(figures, as_json=as_json)


def load(
    gigabytes: Annotated[float, typer.Option(min=0.01, help="Of the file.")] = 0.25,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32 or bfloat16; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What a worker's memory grows by, at its peak, while it takes a version of random weights in
    place of another, beside the largest tensor; read and hashed, and known by its note."""
    from dora_pipe.bench.load import DTYPES, bench_load

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        _emit_figures(list(bench_load(Path(folder), dtype or DTYPES, gigabytes)), as_json=as_json)


def moves(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="demo or llama-25m; with vllm also tiny, 0.6B, 1.7B or 4B of Qwen3's shapes."
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Lengths of sequences; may be repeated.")
    ] = None,
    engine: Annotated[str, typer.Option(help="torch or vllm, in both processes.")] = "torch",
    run: Annotated[
        str, typer.Option(help="Say what moving cost this run instead, from its log.")
    ] = "",
    root: RunsOption = RUNS,
    weights: Annotated[
        bool, typer.Option("--weights", help="Bring weights to many workers instead.")
    ] = False,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="With --weights; may be repeated.")
    ] = None,
    store_mb_s: Annotated[
        list[int] | None,
        typer.Option(
            min=0, help="With --weights: a store of this speed; 0: this disk; may be repeated."
        ),
    ] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="With --weights.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Time until a moved request has its next token, between two processes: with its KV cache by
    files and by Flight, and prefilled."""
    from dora_pipe.launch.run_dir import opened

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        if run:
            from dora_pipe.bench.moves_log import overhead_of

            with opened(run, root) as found:
                _emit_figures([overhead_of(found.bus, found.topics)], as_json=as_json)
        elif weights:
            from dora_pipe.bench.moves_weights import bench_weights

            figures = bench_weights(
                Path(folder),
                workers or WEIGHTS_WORKERS,
                store_mb_s=STORE_MB_S if store_mb_s is None else store_mb_s,
                megabytes=megabytes,
            )
            _emit_figures(list(figures), as_json=as_json)
        else:
            from dora_pipe.bench.moves import bench_moves

            models = model or ("llama-25m",)
            moved = bench_moves(Path(folder), models, tokens or (), engine=engine)
            _emit_figures(moved, as_json=as_json)


def policies(
    steps: Annotated[int, typer.Option(min=1, help="Training steps, each a version.")] = 40,
    learning_rate: Annotated[float, typer.Option(min=1e-12)] = 1e-6,
    whole_every: Annotated[int, typer.Option(min=1, help="As policies.whole_every.")] = 8,
    warm_steps: Annotated[
        int, typer.Option(min=1, help="Steps on demonstrations before the first version.")
    ] = 60,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="That get the last version; may be repeated.")
    ] = None,
    store_mb_s: Annotated[int, typer.Option(min=0, help="Of a store that they share.")] = 200,
    stages: Annotated[
        bool,
        typer.Option("--stages", help="Only: the way of a version, from its step to a token."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Versions of 25 million weights in bfloat16 as patches, beside whole files: how much changes
    in a step, how large patches are, how long they take, and when workers have a version.

    With --stages: where the time goes from the end of a step to the first token that a worker
    samples under its version, by every way to it; --steps so many versions, --store-mb-s the link.
    """
    from dora_pipe.bench.policies import bench_hosts, bench_steps

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as name:
        folder = Path(name).resolve()
        if stages:
            from dora_pipe.bench.version_way import bench_way

            figures = bench_way(folder, versions=steps, mb_s=store_mb_s or WAY_MB_S)
            _emit_figures(list(figures), as_json=as_json)
            return
        figure, digests = bench_steps(
            folder,
            steps=steps,
            learning_rate=learning_rate,
            whole_every=whole_every,
            warm_steps=warm_steps,
        )
        _emit_figures([figure], as_json=as_json)
        hosts = bench_hosts(folder, digests, workers or (4,), store_mb_s=store_mb_s)
        _emit_figures(list(hosts), as_json=as_json)


def plan(
    workers: Annotated[
        list[int] | None, typer.Option(help="Sizes to measure; may be repeated.")
    ] = None,
    turns: Annotated[
        list[int] | None,
        typer.Option(help="Workers of 200 slots in the busy run; may be repeated."),
    ] = None,
    slots: Annotated[
        bool,
        typer.Option("--slots", help="Only: how busy slots are while judges and tools take long."),
    ] = False,
    hangs: Annotated[
        bool,
        typer.Option("--hangs", help="Only: which groups are held by environments that hang."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Cost of one round of the planner by the number of workers, how it grows, and the longest turn
    of the orchestrator in a busy run of 102 400 open requests, part by part.

    With --slots, in virtual time: the share of a worker's slots that is busy. With --hangs, too:
    groups that one environment in a hundred hangs for, by groups.spare and groups.seconds_max."""
    if hangs:
        from dora_pipe.bench.hangs import bench_hangs

        _emit_figures(bench_hangs(), as_json=as_json)
        return
    if slots:
        from dora_pipe.bench.slots import bench_slots

        _emit_figures(bench_slots(), as_json=as_json)
        return
    from dora_pipe.bench.plan import bench_plan, growth_of
    from dora_pipe.bench.turns import bench_turns

    figures = bench_plan(workers or PLAN_WORKERS)
    _emit_figures(figures, as_json=as_json)
    growth = growth_of(figures)
    if growth:
        _emit_figures(growth, as_json=as_json)
    _emit_figures(bench_turns(turns or TURN_WORKERS, slots=TURN_SLOTS), as_json=as_json)


def catalogue(
    trajectories: Annotated[
        list[int] | None, typer.Option(help="Lengths of the logs to follow; may be repeated.")
    ] = None,
    groups: Annotated[
        int, typer.Option(min=1, help="Of 8 trajectories, of a run played without a log.")
    ] = 100_000,
    as_json: JsonOption = False,
) -> None:
    """What a log as tables costs: following it, memory, saving, opening, what is asked often."""
    from dora_pipe.bench.catalogue import LENGTHS, bench_follow, bench_memory

    _emit_figures([bench_memory(groups)], as_json=as_json)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        _emit_figures(list(bench_follow(Path(folder), trajectories or [*LENGTHS])), as_json=as_json)


def bisect(
    run: RunArgument,
    seeds: Annotated[
        int, typer.Option(min=1, help="Groups that are poisoned, one at a time.")
    ] = 10,
    out: Annotated[
        Path | None, typer.Option(help="Where values are kept; the same command goes on.")
    ] = None,
    learning_rate: Annotated[
        float, typer.Option(help="From the poisoned step on; small ones hold the poison back.")
    ] = 7e-4,
    whole: Annotated[bool, typer.Option("--whole", help="What bisect prints of each.")] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Whether bisect names a group whose rewards were poisoned, in a finished run, and in how many
    steps; exit code 5 unless it names every one."""
    from dora_pipe.audit.bisect import Limits
    from dora_pipe.bench.bisect import bench_bisect
    from dora_pipe.core.errors import InvariantBroken
    from dora_pipe.launch.run_dir import opened

    with (
        opened(run, root) as found,
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder,
    ):
        figures = bench_bisect(
            found,
            seeds,
            out or Path(folder),
            limits=Limits(draws=128),
            told=say,
            learning_rate=learning_rate,
            whole=whole,
        )
    _emit_figures(figures, as_json=as_json)
    missed = [one.seed for one in figures if not one.named]
    if missed:
        raise InvariantBroken(f"of {len(figures)} seeds {len(missed)} were not named: {missed}")


def restart(
    trajectories: Annotated[
        list[int] | None,
        typer.Option(help="Lengths of the logs to start at the end of; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time of an orchestrator's restart: the whole log folded, and from its newest snapshot."""
    from dora_pipe.bench.restart import bench_restart

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        _emit_figures(
            list(bench_restart(Path(folder), trajectories or [*RESTART])), as_json=as_json
        )


def data(
    megabytes: Annotated[int, typer.Option(min=1, help="Of the Parquet file.")] = 256,
    as_json: JsonOption = False,
) -> None:
    """Starts on a large Parquet file, and the memory of the process that serves its rows."""
    from dora_pipe.bench.data import bench_data

    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        _emit_figures([bench_data(Path(folder), megabytes)], as_json=as_json)


def tasks(
    seconds: Annotated[float, typer.Option(min=0.1, help="Per case.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """How busy the slots of an engine are while environments take their time, with one process."""
    from dora_pipe.bench.tasks import bench_tasks

    _emit_figures(bench_tasks(seconds=seconds), as_json=as_json)


def endpoint(
    sessions: Annotated[int, typer.Option(min=1, help="Open at the same time.")] = 10_000,
    seconds: Annotated[float, typer.Option(min=1, help="Of agents that think.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """What the endpoint of agents costs: calls, tokens, open sessions, here and in their worker;
    and how busy slots are while agents think."""
    from dora_pipe.bench.endpoint import CALLED, bench_busy, bench_calls, bench_memory
    from dora_pipe.bench.worker_memory import bench_worker_memory

    _emit_figures(list(bench_calls()), as_json=as_json)
    called = min(CALLED, sessions)
    memory = [bench_memory(sessions, called=called), bench_worker_memory(sessions, called=called)]
    _emit_figures(memory, as_json=as_json)
    _emit_figures([bench_busy(seconds=seconds)], as_json=as_json)


def memory(
    tokens: Annotated[int, typer.Option(min=0, help="Of the head; 0: the step alone.")] = 16_384,
    vocabulary: Annotated[int, typer.Option(min=2, help="Of the head.")] = 151_936,
    step_tokens: Annotated[
        int, typer.Option(min=0, help="Of a step's sequence; 0: the head alone.")
    ] = 4_096,
    least: Annotated[bool, typer.Option(help="The step only with all that saves memory.")] = False,
    adapter: Annotated[
        int, typer.Option(min=0, help="Width of a model under an adapter, in place of all that.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Peak memory of a head in chunks of tokens, and of a step of a model of 27 million parameters,
    each in a process of its own; on a GPU, where there is one. Of an adapter: what its trainer
    holds and a step takes, by the type of its base."""
    if adapter:
        from dora_pipe.bench.adapter_memory import bench_adapter_memory

        _emit_figures(list(bench_adapter_memory(adapter, step_tokens)), as_json=as_json)
        return
    from dora_pipe.bench.step_memory import bench_step_memory, memory_cases

    cases = memory_cases(tokens, vocabulary, step_tokens, least=least)
    _emit_figures(bench_step_memory(cases), as_json=as_json)


def _turn_figures(engine: str, folder: Path, rows: Sequence[int], turns: int) -> list[Any]:
    """An engine with prefixes kept, beside itself."""
    from dora_pipe.bench.engine_turns import bench_turns

    if engine == "torch":
        return [*bench_turns(rows, turns)]
    from dora_pipe.bench.engine_turns_vllm import vllm_sides

    sides = vllm_sides(folder, server=engine == "vllm-server")
    return [*bench_turns(rows, turns, sides=sides)]


def _resident_figures(
    engine: str, folder: Path, rows: Sequence[int], resident: Sequence[int]
) -> list[Any]:
    """An engine with so many versions resident."""
    from dora_pipe.bench.engine_lora import TorchHosts, bench_resident

    if engine == "torch":
        return [*bench_resident(rows, resident, hosts=TorchHosts())]
    from dora_pipe.bench.engine_vllm import ServerHosts, VllmHosts

    if engine == "vllm":
        return [*bench_resident(rows, resident, hosts=VllmHosts(folder))]
    with closing(ServerHosts(folder, slots=max(rows))) as hosts:
        return [*bench_resident(rows, resident, hosts=hosts)]


def _beside_generate(
    engine: str, folder: Path, rows: Sequence[int] | None, model: str
) -> Iterable[Any]:
    """An engine beside `generate`."""
    if engine == "vllm":
        from dora_pipe.bench.engine_vllm import bench_vllm, load_of

        return bench_vllm(folder, rows or VLLM_ROWS, load_of(model))
    if engine == "vllm-server":
        from dora_pipe.bench.engine_vllm import bench_server

        return [*bench_server(folder, rows or VLLM_ROWS)]
    from dora_pipe.bench.engine import bench_engine

    return [*bench_engine(rows or (1, 16, 64, 256))]


def _emit_figures(figures: Iterable[Any], *, as_json: bool) -> None:
    """Dataclasses of one kind as a table, or as JSON, each when it is there."""
    if as_json:
        emit_rows((), (asdict(figure) for figure in figures), as_json=True)
        return
    rows = [*figures]
    columns = [field.name for field in fields(rows[0])]
    emit_rows(columns, [asdict(row) for row in rows], as_json=False)

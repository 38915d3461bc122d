"""Commands that start roles, create their inputs and print a configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import typer

from dora_pipe.cli.lazy import EXIT_INTERRUPTED
from dora_pipe.cli.options import (
    EXAMPLES,
    SCHEDULES,
    SFT_BATCH,
    SFT_LEARNING_RATE,
    SFT_SEED,
    SFT_STEPS,
    SFT_STEPS_OF,
    SFT_WARMUP,
    TORCH,
    ConfigArgument,
    ForceOption,
    JsonOption,
    OverrideOption,
    RunsOption,
    may_write_folder,
)
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.core.system.console import RUNS, say, typed

if TYPE_CHECKING:
    from dora_pipe.config.training import RateSchedule


AdoptOption = Annotated[
    bool,
    typer.Option(
        "--adopt",
        help="Accept committed weights that this machine cannot reproduce bitwise.",
    ),
]

ScheduleOption = Annotated[
    str, typer.Option(help="Learning rate schedule: constant, linear or cosine.")
]
RateMinOption = Annotated[
    float, typer.Option(min=0, max=1, help="Final learning rate, as a share of the peak.")
]
ContextOption = Annotated[
    int, typer.Option(min=0, help="Tokens of the longest example; 0: workers.max_model_len.")
]
WeightDecayOption = Annotated[
    float, typer.Option(min=0, help="AdamW weight decay; excludes norms and biases.")
]
PackingOption = Annotated[
    bool,
    typer.Option(
        "--packing", help="Pack several examples per row; they do not attend to each other."
    ),
]
ThreadsOption = Annotated[
    int, typer.Option(min=1, help="CPU threads. Changing this changes results bitwise.")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue an existing run.")]


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="New directory.")],
    task: Annotated[str, typer.Option(help="arithmetic or calculator.")] = EXAMPLES[0],
    engine: Annotated[str, typer.Option(help="torch or vllm.")] = TORCH,
) -> None:
    """Make a folder with a configuration and a small random model for a built-in task."""
    if task not in EXAMPLES:
        raise UsageError(
            f"no example for task {task!r}",
            hint=f"{' or '.join(EXAMPLES)}; for own data see examples/jsonl-llama",
        )
    if directory.exists():
        raise UsageError(f"{directory} exists", hint="name a folder that does not")
    from dora_pipe.launch.examples import example_config, make_model
    from dora_pipe.producers.engines.registry import engine_kind

    engine_kind(engine)
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(example_config(task, engine))
    parameters = make_model(directory / "model", task)
    say(f"{directory}/config.toml and {directory}/model ({parameters:,} parameters)")
    steps = SFT_STEPS_OF[task]
    say(f"next: dora-pipe sft {directory}/config.toml {directory}/warm --steps {steps}")
    say(f"then: dora-pipe run {directory}/config.toml -o model.path={directory}/warm")


def config_command(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A TOML file. Default: that of `dora-pipe init`."),
    ] = None,
    override: OverrideOption = None,
    every: Annotated[bool, typer.Option("--all", help="Also advanced keys at defaults.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved configuration: basic keys and changed ones, with descriptions."""
    from dora_pipe.cli.output import emit_json, emit_text, takes_unicode
    from dora_pipe.config.describe import toml_escape
    from dora_pipe.config.load import dump_toml, load_config
    from dora_pipe.launch.examples import example_file

    config = load_config(file or example_file(EXAMPLES[0]), override or ())
    if as_json:
        emit_json(msgspec.to_builtins(config))
        return
    shown = dump_toml(config, every=every)
    if not takes_unicode():
        shown = "".join(char if char.isascii() else toml_escape(char) for char in shown)
    emit_text(shown)


def sft(
    config: ConfigArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the trained model.")],
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="Rows of messages, or of prompt and answer: a file, a glob,"
            " hf:NAME; default: the task's own.",
        ),
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = SFT_STEPS,
    batch: Annotated[int, typer.Option(min=1, help="Demonstrations per step.")] = SFT_BATCH,
    learning_rate: Annotated[
        float, typer.Option(min=0, help="Peak learning rate.")
    ] = SFT_LEARNING_RATE,
    schedule: ScheduleOption = "constant",
    warmup_steps: Annotated[int, typer.Option(min=0, help="Warm-up steps.")] = SFT_WARMUP,
    min_lr_ratio: RateMinOption = 0.0,
    weight_decay: WeightDecayOption = 0.0,
    context: ContextOption = 0,
    packing: PackingOption = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the data.")] = SFT_SEED,
    threads: ThreadsOption = 1,
    force: ForceOption = False,
    override: OverrideOption = None,
) -> None:
    """Train the model of a configuration on assistant messages (supervised warm start).

    With `lora.rank`, train only an adapter. OUT then contains the merged weights and the adapter.
    """
    from dora_pipe.config.load import load_config
    from dora_pipe.launch.model_checks import check_tokenizer
    from dora_pipe.launch.roles import share_cores
    from dora_pipe.launch.warm_start import data_rows, demonstrations, sft_options, warm_up

    if schedule not in SCHEDULES:
        raise UsageError(f"no schedule {schedule!r}", hint=f"one of {', '.join(SCHEDULES)}")
    resolved = load_config(config, override or ())
    check_tokenizer(Path(resolved.model.path))
    may_write_folder(out, force=force)
    count = steps * batch
    rows = data_rows(data) if data else demonstrations(resolved, seed=seed, count=count)
    share_cores()
    options = sft_options(
        resolved,
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        schedule=cast("RateSchedule", schedule),
        warmup_steps=warmup_steps,
        min_lr_ratio=min_lr_ratio,
        weight_decay=weight_decay,
        seed=seed,
        threads=threads,
        context_tokens=context or resolved.workers.max_model_len,
        packing=packing,
    )
    warm_up(resolved, rows, out, options)
    say(f"wrote {out}")


def run(
    config: ConfigArgument,
    override: OverrideOption = None,
    resume: ResumeOption = False,
    from_: Annotated[
        str, typer.Option("--from", metavar="RUN@STEP", help="Start from a policy of another run.")
    ] = "",
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="With --from: also load the optimizer state.")
    ] = False,
    adopt: AdoptOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show all metrics of each step.")
    ] = False,
    root: RunsOption = RUNS,
) -> None:
    """Start orchestrator, workers and trainer on this machine and supervise them."""
    if resume and from_:
        raise UsageError("--resume continues a run and --from starts a new one: choose one")
    if with_optimizer and not from_:
        raise UsageError("--with-optimizer needs --from RUN@STEP")
    from dora_pipe.config.load import load_config
    from dora_pipe.launch.plan import plan_new, plan_resume
    from dora_pipe.launch.run import RESUMABLE_CODES, need_parts, refuse_copy, supervise
    from dora_pipe.launch.run_dir import RunDir
    from dora_pipe.launch.supervisor import RunFailed

    if resume:
        refuse_copy(RunDir(config), root)
    resolved = load_config(config, override or ())
    need_parts(resolved)
    if resume:
        plan = plan_resume(resolved, root, here=True)
        if plan.over:
            name = plan.config.run.name
            say(f"run {name!r} is finished and cannot be resumed; {plan.over}")
            return
    else:
        plan = plan_new(resolved, root, parent=from_, with_optimizer=with_optimizer, here=True)
    resuming = f"resume it with: {typed('run', plan.directory.path, '--resume', runs=root)}"
    try:
        finished = supervise(replace(plan, adopt=adopt, resumed=resume), verbose=verbose)
    except (RunFailed, ResourceError) as failed:
        if failed.exit_code in RESUMABLE_CODES:
            say(f"after fixing that, {resuming}")
        raise
    if not finished:
        say(resuming)
        raise typer.Exit(EXIT_INTERRUPTED)


def orchestrator(
    config: ConfigArgument, override: OverrideOption = None, root: RunsOption = RUNS
) -> None:
    """Start the orchestrator of a run, on any machine; a second one fences the first."""
    from dora_pipe.config.load import load_config
    from dora_pipe.launch import local_roles, roles
    from dora_pipe.launch.plan import plan_elsewhere, plan_new, plan_resume
    from dora_pipe.launch.run_dir import locked, run_dir

    roles.log_as(local_roles.ORCHESTRATOR)
    resolved = load_config(config, override or ())
    with locked(run_dir(resolved, root), shared=True):
        if run_dir(resolved, root).exists():
            plan = plan_resume(resolved, root)
        else:
            plan = plan_elsewhere(resolved, root) or plan_new(resolved, root)
    with locked(plan.directory, shared=True):
        roles.orchestrator(plan.directory, plan.config, plan.first)


def worker(
    config: ConfigArgument,
    name: Annotated[str, typer.Option(help="Name of the worker, unique in the run.")],
    engine: Annotated[str, typer.Option(help="torch or vllm; default: workers.engine.")] = "",
    override: OverrideOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Start one rollout worker of a run; its engine may differ from that of other workers."""
    from dora_pipe.config.load import load_config
    from dora_pipe.launch import roles
    from dora_pipe.launch.run_dir import run_dir
    from dora_pipe.producers.engines.registry import check_engines, need_engines
    from dora_pipe.schemas.topics import check_worker_name

    check_worker_name(name)
    roles.log_as(name)
    resolved = load_config(config, override or ())
    engine = engine or resolved.workers.engine
    need_engines([engine], resolved.task.directory)
    check_engines(resolved, [engine])
    roles.worker(run_dir(resolved, root), resolved, name, engine=engine)


def trainer(
    config: ConfigArgument,
    override: OverrideOption = None,
    adopt: AdoptOption = False,
    nodes: Annotated[int, typer.Option(min=1, help="Machines of the trainer.")] = 1,
    node: Annotated[int, typer.Option(min=0, help="Index of this machine, from 0.")] = 0,
    rendezvous: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of node 0 at which all ranks connect.")
    ] = "",
    root: RunsOption = RUNS,
) -> None:
    """Start the trainer of a run; a second one fences the first. On several machines, run the same
    command with different --node values."""
    from dora_pipe.config.load import load_config
    from dora_pipe.launch import local_roles, roles
    from dora_pipe.launch.nodes import Node, run_trainer_node
    from dora_pipe.launch.run_dir import locked, run_dir

    roles.log_as(local_roles.TRAINER)
    resolved = load_config(config, override or ())
    if nodes > 1:
        words = ["trainer", str(config), "--runs", str(root), *(["--adopt"] if adopt else [])]
        words += [word for setting in override or () for word in ("-o", setting)]
        this = Node(nodes=nodes, node=node, rendezvous=rendezvous)
        raise typer.Exit(run_trainer_node(resolved, this, words))
    with locked(run_dir(resolved, root), shared=True):
        roles.trainer(run_dir(resolved, root), resolved, adopt=adopt)


def serve_task(
    config: ConfigArgument,
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0: any free port.")],
    task: Annotated[
        str, typer.Option(help="Name of the task, if the configuration has several.")
    ] = "",
    processes: Annotated[
        int, typer.Option(min=1, help="Maximum processes of all workers together.")
    ] = 8,
    override: OverrideOption = None,
) -> None:
    """Serve the task of a configuration to the workers whose task.url names this address. Each
    connection gets a process. There is no TLS: see docs/environments.md."""
    from dora_pipe.producers.tasks.serving import serve_task

    serve_task(config, override or (), listen=listen, name=task, processes=processes)

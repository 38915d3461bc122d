"""Commands about this machine: services in containers, what it lacks, a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.cli.options import JsonOption, OverrideOption, ParadigmOption
from dora_pipe.cli.output import emit_json, emit_rows, emit_table, emit_text, takes_unicode
from dora_pipe.core.console import say
from dora_pipe.core.errors import ResourceError, UsageError


def up(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Three brokers in place of one.")
    ] = False,
    demo: Annotated[bool, typer.Option("--demo", help="The demo too, every role apart.")] = False,
    no_observe: Annotated[
        bool, typer.Option("--no-observe", help="No metrics, dashboards and traces.")
    ] = False,
    kafka_ui: Annotated[bool, typer.Option("--kafka-ui", help="Topics in a browser too.")] = False,
    run: Annotated[
        str, typer.Option("--run", metavar="NAME", help="The run to observe; default demo.")
    ] = "",
    build: Annotated[
        bool, typer.Option("--build", help="Build the images anew, after a change of the code.")
    ] = False,
) -> None:
    """Start a broker and what shows a run on it, in containers, and say which page is where."""
    from dora_pipe.cli.up import (
        CLUSTER,
        DEMO,
        LOOK_HINT,
        PAGES_LIMIT_S,
        RUN_VARIABLE,
        SINGLE,
        asked_of,
        check_docker,
        compose_file,
        compose_words,
        pages_of,
        profiles_of,
        refuse_clash,
        run_compose,
        silent_of,
    )
    from dora_pipe.core.clock import SystemClock
    from dora_pipe.schemas.topics import RULE, is_name

    if run and not is_name(run):
        raise UsageError(f"--run {run!r} is no name of a run", hint=RULE)
    profiles = profiles_of(cluster=cluster, demo=demo, observe=not no_observe, kafka_ui=kafka_ui)
    file = compose_file()
    check_docker()
    running = asked_of([*compose_words(file, (SINGLE, CLUSTER)), "ps", "--services"]).split()
    refuse_clash(profiles, running)
    if DEMO in profiles:
        say("the demo warms its model up first, which takes minutes")
    words = [*compose_words(file, profiles), "up", "--detach", *(["--build"] if build else [])]
    run_compose(words, {RUN_VARIABLE: run} if run else {})
    pages = pages_of(profiles)
    silent = silent_of(pages, SystemClock())
    emit_table(("what", "where"), [(page.what, page.where) for page in pages])
    if silent:
        raise ResourceError(
            f"no answer within {PAGES_LIMIT_S:.0f} s: {', '.join(page.where for page in silent)}",
            hint=LOOK_HINT,
        )


def down(
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Delete the log, the store and all other data too.")
    ] = False,
) -> None:
    """Stop what `up` started; the log and everything else is kept unless --volumes says so."""
    from dora_pipe.cli.up import PROFILES, check_docker, compose_file, compose_words, run_compose

    file = compose_file()
    check_docker()
    run_compose([*compose_words(file, PROFILES), "down", *(["--volumes"] if volumes else [])], {})
    say("all data is deleted" if volumes else "stopped; `dora-pipe up` goes on with the same data")


def doctor(
    bus: Annotated[str, typer.Option(help="Also try this log, e.g. kafka://host:9092.")] = "",
    config: Annotated[
        Path | None,
        typer.Option(help="Try the log of this TOML file or run directory, with its user."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Instead: what a run of this model takes of GPUs."),
    ] = None,
    gpus: Annotated[
        str, typer.Option(metavar="NxGB", help="Whether it fits on these, e.g. 8x80.")
    ] = "",
    override: OverrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: versions, extras, disk, threads, and a log if one is named; or say, with
    --model or --gpus, whether a model fits on machines that need not be here."""
    from dora_pipe.cli.doctor import (
        config_file_of,
        config_findings,
        context_findings,
        log_findings,
        machine_findings,
    )
    from dora_pipe.config.load import load_config
    from dora_pipe.launch.run_dir import RunDir

    if model or gpus:
        from dora_pipe.cli.memory import print_estimate

        if bus:
            raise UsageError("--bus is of this machine, --model and --gpus are of any")
        file = config_file_of(config) if config else None
        if not print_estimate(model, gpus, file, override or (), as_json=as_json):
            raise typer.Exit(1)
        return
    findings = machine_findings()
    wanted = load_config(config_file_of(config), override or ()) if config else None
    url = bus or (wanted.bus.url if wanted else "")
    if url:
        findings += log_findings(url, wanted)
    if config and (run := RunDir(config_file_of(config).parent)).exists():
        findings += config_findings(run)
    if wanted:
        findings += context_findings(wanted)
    rows = [one._asdict() for one in findings]
    emit_rows(("state", "what", "detail"), rows, as_json=as_json)
    if any(one.state == "fail" for one in findings):
        raise typer.Exit(1)


def show(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    override: OverrideOption = None,
    paradigm: ParadigmOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print the resolved configuration, every key with its meaning."""
    import msgspec

    from dora_pipe.config.describe import toml_escape
    from dora_pipe.config.load import dump_toml, load_config

    resolved = load_config(config, override or (), paradigm=paradigm)
    if as_json:
        emit_json(msgspec.to_builtins(resolved))
        return
    shown = dump_toml(resolved)
    if not takes_unicode():
        shown = "".join(one if one.isascii() else toml_escape(one) for one in shown)
    emit_text(shown)

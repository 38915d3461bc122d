"""Commands that need no run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.cli.options import EXAMPLES, TORCH, JsonOption, OverrideOption, RunsOption
from dora_pipe.cli.output import emit_json, emit_rows, emit_text, takes_unicode
from dora_pipe.core.system.console import RUNS


def doctor(
    bus: Annotated[str, typer.Option(help="Also check this log, e.g. kafka://host:9092.")] = "",
    config: Annotated[
        Path | None,
        typer.Option(help="Also check this TOML file or run directory, and its log."),
    ] = None,
    override: OverrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: versions, extras, disk and GPUs, and a log if one is named."""
    from dora_pipe.cli.doctor import (
        config_file_of,
        config_findings,
        context_findings,
        log_findings,
        machine_findings,
    )
    from dora_pipe.config.load import load_config
    from dora_pipe.launch.run_dir import RunDir

    findings = machine_findings()
    resolved = load_config(config_file_of(config), override or ()) if config else None
    url = bus or (resolved.bus.url if resolved else "")
    if url:
        findings += log_findings(url, resolved)
    if config and (run := RunDir(config_file_of(config).parent)).exists():
        findings += config_findings(run)
    if resolved:
        findings += context_findings(resolved)
    rows = [finding._asdict() for finding in findings]
    emit_rows(("state", "what", "detail"), rows, as_json=as_json)
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


def memory(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model directory, or a run's TOML file.")
    ],
    gpus: Annotated[str, typer.Option(metavar="NxGB", help="Check these GPUs, e.g. 8x80.")] = "",
    override: OverrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate the GPU memory and disk of a run, and the keys that make it fit."""
    from dora_pipe.cli.memory import print_estimate

    if not print_estimate(model, gpus, override or (), as_json=as_json):
        raise typer.Exit(1)


def config(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A TOML file. Default: that of `dora-pipe init`."),
    ] = None,
    override: OverrideOption = None,
    every: Annotated[bool, typer.Option("--all", help="Also advanced keys at defaults.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved configuration: basic keys and changed ones, with descriptions."""
    import msgspec

    from dora_pipe.config.describe import toml_escape
    from dora_pipe.config.load import dump_toml, load_config
    from dora_pipe.launch.examples import example_file

    resolved = load_config(file or example_file(EXAMPLES[0]), override or ())
    if as_json:
        emit_json(msgspec.to_builtins(resolved))
        return
    shown = dump_toml(resolved, every=every)
    if not takes_unicode():
        shown = "".join(char if char.isascii() else toml_escape(char) for char in shown)
    emit_text(shown)


def demo(
    root: RunsOption = RUNS,
    engine: Annotated[str, typer.Option(help="torch or vllm.")] = TORCH,
    override: OverrideOption = None,
) -> None:
    """Warm up, train with several policy versions at once, kill a worker, audit, replay."""
    from dora_pipe.cli.demo import run_demo

    run_demo(root, engine, override or ())

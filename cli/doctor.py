"""`doctor`: check this machine and a log for what a run needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from dora_pipe.audit.effective_config import config_drift
from dora_pipe.bus import open_bus
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.kafka.cluster import WANTED_REPLICAS, brokers_of, setting_problems
from dora_pipe.bus.kafka.security import KafkaSecurity
from dora_pipe.cli.options import JsonOption, OverrideOption
from dora_pipe.cli.output import emit_rows
from dora_pipe.config.load import config_file_in, load_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import (
    ConfigError,
    DoraError,
    PolicyError,
    TopicMissing,
    UsageError,
    install_hint,
)
from dora_pipe.launch.local_roles import VISIBLE
from dora_pipe.launch.plan import topic_specs
from dora_pipe.launch.run_dir import FREE_BYTES_MIN, RunDir, opened
from dora_pipe.schemas.topics import Topics

if TYPE_CHECKING:
    from dora_pipe.launch.prompt_check import PromptsSeen

GPUS_LIMIT_S = 10.0

State = Literal["ok", "note", "fail"]


class CheckResult(NamedTuple):
    """Result of one check; `note` marks an optional item that is missing."""

    state: State
    what: str
    detail: str


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
    findings = machine_findings()
    resolved = load_config(config, override or ()) if config else None
    url = bus or (resolved.bus.url if resolved else "")
    if url:
        findings += log_findings(url, resolved)
    if config and (run := RunDir(config_file_in(config).parent)).exists():
        findings += config_findings(run)
    if resolved:
        findings += context_findings(resolved)
    rows = [finding._asdict() for finding in findings]
    emit_rows(("state", "what", "detail"), rows, as_json=as_json)
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


def _failed(what: str, error: DoraError) -> CheckResult:
    detail = f"{error.message}; {error.hint}" if error.hint else error.message
    return CheckResult("fail", what, detail)


def machine_findings() -> list[CheckResult]:
    """Return the checks that need no log."""
    versions = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    results = [CheckResult("ok", "machine", versions)]
    for name in ("torch", "transformers", "vllm", "deepspeed"):
        version, extra = _version(name), "torch" if name == "transformers" else name
        detail = version or f"not installed: {install_hint(extra)}"
        results.append(CheckResult("ok" if version else "note", name, detail))
    free = shutil.disk_usage(Path.cwd()).free
    state: State = "ok" if free >= FREE_BYTES_MIN else "fail"
    return [*results, CheckResult(state, "disk", f"{free // 1024**2} MiB free here"), _gpus()]


def _version(module: str) -> str:
    """Return the version of an installed module, else ""; vLLM for CPUs has another name."""
    for name in (module, f"{module}-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _gpus() -> CheckResult:
    program = shutil.which("nvidia-smi")
    if program is None:
        return CheckResult("note", "gpus", "none: there is no nvidia-smi")
    command = [program, "--query-gpu=index,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GPUS_LIMIT_S)
    except subprocess.TimeoutExpired:
        detail = f"nvidia-smi did not answer within {GPUS_LIMIT_S:.0f} s"
        return CheckResult("fail", "gpus", detail)
    lines = (done.stdout or done.stderr).strip().splitlines()
    if done.returncode or not lines:
        ended = f"nvidia-smi ended with exit code {done.returncode}"
        return CheckResult("note", "gpus", lines[0] if lines else ended)
    words = [line.replace(", ", " ", 1) for line in lines]
    if VISIBLE in os.environ:
        words.append(f"{VISIBLE}={os.environ[VISIBLE]}")
    return CheckResult("ok", "gpus", "; ".join(words))


def log_findings(url: str, config: Config | None) -> Iterator[CheckResult]:
    """Yield checks of a log, and of the topics of a configuration's run."""
    security = KafkaSecurity.of(config.bus) if config else KafkaSecurity()
    try:
        with closing(open_bus(url, security)) as bus:
            names = bus.topics()
            kafka = isinstance(bus, KafkaBus)
            who = f", as {security.principal} by {security.protocol}" if kafka else ""
            yield CheckResult("ok", "log", f"{url}: {len(names)} topics{who}")
            there: list[str] = []
            if config is not None:
                expected = Topics(config.run.name).all()
                there = [name for name in expected if name in names]
                yield _topics(config.run.name, len(there), len(expected))
            if isinstance(bus, KafkaBus):
                yield from _cluster(bus, config, there)
    except DoraError as error:
        yield _failed("log", error)


def config_findings(directory: RunDir) -> Iterator[CheckResult]:
    """Compare a directory's configuration with its log; free keys may differ."""
    try:
        with opened(str(directory.path)) as run:
            drift = config_drift(run.bus, run.topics, run.config)
    except UsageError:
        return  # no log to compare with yet
    except DoraError as error:
        if not isinstance(error, TopicMissing) or directory.was_started:  # a new run makes topics
            yield _failed("config.toml", error)
        return
    state: State = "fail" if drift.frozen else "note" if drift else "ok"
    yield CheckResult(state, "config.toml", drift.line or "equal to the log's")


def context_findings(config: Config) -> Iterator[CheckResult]:
    """Check that `workers.max_model_len` fits model, engines and prompts; needs a local model."""
    model, context = Path(config.model.path), config.workers.max_model_len
    if not model.is_dir() or importlib.util.find_spec("tokenizers") is None:
        yield CheckResult("note", "context", "skipped: no model or tokenizer on this machine")
        return
    from dora_pipe.launch.model_checks import check_model, templated, unassigned_note
    from dora_pipe.launch.prompt_check import seen_by_doctor
    from dora_pipe.producers.worker.role import sampling_by_source

    try:
        check_model(config, [config.workers.engine], model)
    except DoraError as error:
        yield _failed("context", error)
    else:
        yield CheckResult("ok", "context", f"{context} tokens, by {config.workers.engine}")
        if note := unassigned_note(model):
            yield CheckResult("note", "tokenizer", note)
    samplings = sampling_by_source(config)
    try:
        with templated(config, model) as directory:
            for prompts in seen_by_doctor(config, directory):
                yield _prompts(prompts, context, samplings[prompts.source].max_tokens)
    except (ConfigError, PolicyError) as error:  # the run raises it, too
        yield _failed("prompts", error)
    except DoraError as error:
        yield CheckResult("note", "prompts", f"skipped: {_failed('', error).detail}")


def _prompts(prompts: PromptsSeen, context: int, max_tokens: int) -> CheckResult:
    what, looked, notes = f"prompts, {prompts.source}", prompts.looked_at, list(prompts.notes())
    if prompts.hopeless:
        return CheckResult("fail", what, "; ".join(notes))
    longest = max(prompts.lengths, default=0)
    unfit, short = prompts.beyond(context - 1), prompts.beyond(context - max_tokens)
    state: State = "fail" if looked and unfit == looked else "note" if notes or short else "ok"
    room = "" if short else " with room for max_tokens"
    notes.append(f"{looked} of {prompts.rows} checked, up to {longest} tokens{room}")
    if unfit:
        notes.append(f"{unfit} do not fit a context of {context}: invalid, as PromptUnfit")
    elif short:
        room = f"{short} leave less than max_tokens, {max_tokens}, in a context of {context}"
        notes.append(f"{room}: answers are cut")
    if short:
        notes.append(f"workers.max_model_len = {longest + max_tokens} fits all")
    return CheckResult(state, what, "; ".join(notes))


def _topics(run: str, there: int, expected: int) -> CheckResult:
    if there == expected:
        return CheckResult("ok", "topics", f"all {there} of run {run!r}")
    lost = "the others are deleted or hidden from this user" if there else "a new run creates them"
    return CheckResult("note", "topics", f"{there} of {expected} of run {run!r}: {lost}")


def _cluster(bus: KafkaBus, config: Config | None, topics: Sequence[str]) -> Iterator[CheckResult]:
    count = len(bus.ask(brokers_of))
    if count >= WANTED_REPLICAS:
        yield CheckResult("ok", "brokers", f"{count}: they survive the loss of one machine")
    else:
        yield CheckResult("note", "brokers", f"{count}: their records are lost with a disk")
    if config is None or not topics:
        return
    specs = {spec.name: spec for spec in topic_specs(config)}
    problems = setting_problems(bus.facts(topics), specs)
    if not problems:
        yield CheckResult("ok", "settings", "of all its topics")
    for problem in problems:
        detail = f"{problem.text}; {problem.hint}"
        yield CheckResult("fail" if problem.fatal else "note", "settings", detail)

"""What `dora-pipe doctor` says of a log: whether it is reached, and as whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from dora_pipe.audit.config_drift import config_drift
from dora_pipe.bus.kafka.security import KafkaSecurity
from dora_pipe.bus.open import open_bus
from dora_pipe.bus.port import Bus
from dora_pipe.cli.check_result import CheckResult, State, failed
from dora_pipe.config.model import Config
from dora_pipe.core.errors import DoraError, UsageError
from dora_pipe.launch.run_dir import RunDir, opened
from dora_pipe.schemas.topics import Topics


def log_findings(url: str, config: Config | None) -> Iterator[CheckResult]:
    """Rows about the log at an address, and about the topics of a configuration's run."""
    security = KafkaSecurity.of(config.bus) if config else KafkaSecurity()
    try:
        with closing(open_bus(url, security)) as bus:
            yield from _of(bus, url, config, security)
    except DoraError as error:
        yield failed("log", error)


def _of(
    bus: Bus, url: str, config: Config | None, security: KafkaSecurity
) -> Iterator[CheckResult]:
    kafka = url.startswith("kafka:")
    names = bus.topics()
    who = f", as {security.principal} by {security.protocol}" if kafka else ""
    yield CheckResult(what="log", state="ok", detail=f"{url}: {len(names)} topics{who}")
    there: list[str] = []
    if config is not None:
        wanted = Topics(config.run.name).all()
        there = [name for name in wanted if name in names]
        yield _found(config.run.name, len(there), len(wanted))
    if kafka:
        from dora_pipe.cli.doctor_kafka import cluster_findings

        yield from cluster_findings(bus, config, there)


def config_findings(directory: RunDir) -> Iterator[CheckResult]:
    """Whether a run directory's configuration is the one in its log: free keys may differ."""
    try:
        with opened(str(directory.path)) as run:
            drift = config_drift(run.bus, run.topics, run.config)
    except UsageError:
        return  # There is no log yet to compare with.
    except DoraError as error:
        yield failed("config.toml", error)
        return
    state: State = "fail" if drift.frozen else "note" if drift else "ok"
    yield CheckResult(what="config.toml", state=state, detail=drift.line or "as the log has it")


def _found(run: str, there: int, wanted: int) -> CheckResult:
    if there == wanted:
        return CheckResult(what="topics", state="ok", detail=f"all {there} of run {run!r}")
    detail = f"{there} of {wanted} of run {run!r}; a new run makes them"
    if there:
        detail = (
            f"{there} of {wanted} of run {run!r}: the others are gone, or hidden from this user"
        )
    return CheckResult(what="topics", state="note", detail=detail)

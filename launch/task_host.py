"""Serves the task of a configuration file to workers on other machines, until it is stopped."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from dora_pipe.config.load import load_config
from dora_pipe.core.console import say
from dora_pipe.core.errors import ConfigError, ResourceError
from dora_pipe.core.own_code import nearest
from dora_pipe.producers.tasks.links import host_and_port, token_of
from dora_pipe.producers.tasks.serving import TaskHost


def serve_task(
    path: Path, overrides: Sequence[str], *, listen: str, name: str, processes: int, keep_s: float
) -> None:
    """Serve, and say where. Raises ConfigError for an unknown task or address, ResourceError where
    nobody can listen there."""
    tasks = {one.name: one for one in load_config(path, overrides).tasks}
    if name not in tasks and (name or len(tasks) > 1):
        raise ConfigError(f"there is no task `{name}`", hint=nearest(name, tasks))
    task = tasks[name] if name in tasks else next(iter(tasks.values()))
    if task.url:
        raise ConfigError("task.url: a server of tasks runs them itself", hint="leave it out there")
    try:
        address = host_and_port(listen)
    except ValueError:
        raise ConfigError(f"--listen: `{listen}` is not HOST:PORT") from None
    stopped: list[int] = []
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda number, _: stopped.append(number))
    token = token_of(task.url_token_file)
    try:
        host = TaskHost(task, address, token=token, processes_max=processes, keep_s=keep_s)
    except OSError as error:
        raise ResourceError(f"nobody can listen at {listen}: {error}") from error
    with host:
        say(f"serving `{task.kind}` at tcp://{host.address[0]}:{host.address[1]}")
        host.serve(stop=lambda: bool(stopped))

"""Rollouts of verifiers as sessions of a worker, and the runtime of their local programs.

Verifiers' own server forwards a harness's calls to the session's address. A harness program (PEP
723) usually gets an environment by `uv sync`; if its requirements are installed here, it runs in
this interpreter, offline. Programs die with the task process.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import itertools
import os
import re
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

from dora_pipe.core.system.linux import dying

MODEL: Final = "policy"

_KEY_VARIABLE: Final = "DORA_PIPE_API_KEY_"
"""Prefix of key variables: verifiers reads keys from the environment, and hides names with
`API_KEY` from programs."""

_METADATA: Final = re.compile(r"(?m)^# /// script\s*$\n((?:^#(?:| .*)$\n)+?)^# ///\s*$")

_numbers = itertools.count()


@contextmanager
def session_client(vf: Any, base_url: str, api_key: str) -> Iterator[Any]:
    """Yield the client of a session in verifiers' form."""
    variable = f"{_KEY_VARIABLE}{next(_numbers)}"
    os.environ[variable] = api_key
    try:
        yield vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
    finally:
        del os.environ[variable]


class SessionInterception:
    """`Interception` of verifiers that routes each rollout to its own session."""

    def __init__(self, vf: Any, inner: Any) -> None:
        self._inner = inner
        # Verifiers never drops a client: all share the connections of one with a dummy endpoint.
        self._shared = vf.EvalClientConfig(base_url="http://session.invalid", api_key_var="-")
        _cut_by_a_limit.__annotations__["trace"] = vf.Trace  # verifiers calls it with this argument

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        """Yield the session's endpoint; a seat with its own client keeps it."""
        own = session.ctx
        if not own.client.api_key_var.startswith(_KEY_VARIABLE):
            async with self._inner.acquire(session) as slot:
                yield slot
            return
        session.ctx = dataclasses.replace(own, client=self._shared)
        async with self._inner.acquire(session) as slot:
            client = copy.copy(session.client)
            client.base_url = own.client.base_url
            client.api_key = os.environ[own.client.api_key_var]
            session.ctx, session.client = own, client
            session.trace_stops.append(_cut_by_a_limit)
            yield slot


def _cut_by_a_limit(trace: Any) -> bool:
    """Stop before the next call, which would be rejected, so that verifiers scores the rollout."""
    if not trace.calls or trace.calls[-1].finish_reason != "length":
        return False
    sampling = trace.calls[-1].sampling
    return sampling is None or sampling.max_tokens is None


def run_programs_here(runtimes: Any) -> None:
    """Replace the subprocess runtime of verifiers' module `runtimes`."""
    if getattr(runtimes.SubprocessRuntime, "here", False):
        return

    class HereRuntime(runtimes.SubprocessRuntime):  # type: ignore[misc]
        """Subprocess runtime that uses this interpreter if it has all requirements."""

        here = True

        async def run(self, argv: list[str], env: dict[str, str]) -> Any:
            return await super().run(dying(argv), env)

        async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
            await super().run_background(dying(argv), env, log)

        async def open_process(self, argv: list[str], env: dict[str, str]) -> Any:
            return await super().open_process(dying(argv), env)

        async def prepare_uv_script(
            self, script: str | bytes, env: dict[str, str] | None = None, **options: Any
        ) -> list[str]:
            text = script if isinstance(script, str) else script.decode()
            if missing_of(text):
                command: list[str] = await super().prepare_uv_script(script, env, **options)
                return command
            return [sys.executable, str(_written(text, Path(self.scripts_dir)))]

    runtimes.SubprocessRuntime = HereRuntime


@functools.lru_cache(maxsize=64)
def missing_of(script: str) -> tuple[str, ...]:
    """Return requirements of a script that this interpreter lacks, or ("metadata",) for a script
    without metadata.

    Example: ``missing_of(script) == ("mcp==2.0.0",)``.
    """
    # Verifiers depends on it; this project does not.
    requirement = importlib.import_module("packaging.requirements").Requirement
    block = _METADATA.search(script)
    if block is None:
        return ("metadata",)
    metadata = tomllib.loads(re.sub(r"(?m)^# ?", "", block[1]))
    asked = [requirement(dependency) for dependency in metadata.get("dependencies", ())]
    python = requirement(f"python{metadata.get('requires-python', '')}")
    version = ".".join(map(str, sys.version_info[:3]))
    missing = [] if python.specifier.contains(version) else [str(python)]
    return (
        *missing,
        *(str(package) for package in asked if not _installed(package)),
    )


def _installed(asked: Any) -> bool:
    if asked.marker is not None and not asked.marker.evaluate():
        return True
    try:
        version = importlib.metadata.version(asked.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return not asked.extras and bool(asked.specifier.contains(version, prereleases=True))


def _written(script: str, folder: Path) -> Path:
    path = folder / f"{hashlib.sha256(script.encode()).hexdigest()}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        mine = path.with_suffix(f".{os.getpid()}.{next(_numbers)}")
        mine.write_text(script)
        mine.replace(path)
    return path

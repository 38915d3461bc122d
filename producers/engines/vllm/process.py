"""The process of a vLLM server that a worker starts.

It listens on 127.0.0.1 and gets a random key by its environment. It exits with the worker, because
its stdin closes.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from dora_pipe.config.workers import Vllm
from dora_pipe.core.errors import ConfigError, DoraError, PolicyError, ResourceError
from dora_pipe.producers.engines.vllm.http import Address, call
from dora_pipe.producers.engines.vllm.serve import KEY_VARIABLE
from dora_pipe.producers.engines.vllm.wire import HEALTH

PROGRAM: Final = "dora_pipe.producers.engines.vllm.serve"

START_S: Final = 900.0
"""Timeout of the start; vLLM is imported twice."""

ASK_S: Final = 0.2

STOP_S: Final = 10.0
"""Time from SIGTERM to SIGKILL."""

SETTLE_S: Final = 10.0
"""Wait for an exit: vLLM checks its engine core every five seconds."""

KEY_BYTES: Final = 32
REPORT_BYTES_MAX: Final = 1 << 16


class ServerProcess:
    """A running server; `address` includes its key.

    Example::

        server = ServerProcess.start(Path("model"), Vllm(), slots=64,
                                     context_tokens=1024, threads=1)
        server.check()
        server.close()
    """

    def __init__(self, process: subprocess.Popen[bytes], report: int, key: str) -> None:
        self._process = process
        self._report = report
        self._key = key
        self.address = Address(host="127.0.0.1", port=0, key=key)

    @classmethod
    def start(
        cls,
        model_dir: Path,
        settings: Vllm,
        *,
        slots: int,
        context_tokens: int,
        threads: int,
        sleep: bool = False,
        lora_rank: int = 0,
        max_resident_versions: int = 1,
    ) -> ServerProcess:
        """Start a server and wait until it is healthy. Raises PolicyError for an unsupported model,
        ResourceError."""
        words = [sys.executable, "-m", PROGRAM, str(model_dir), "--lifeline"]
        words += ["--max-num-seqs", str(slots), "--max-model-len", str(context_tokens)]
        words += ["--threads", str(threads), "--dtype", settings.dtype]
        words += ["--kv-cache-gb", str(settings.kv_cache_gb), "--lora-rank", str(lora_rank)]
        words += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
        words += ["--pipeline-parallel-size", str(settings.pipeline_parallel_size)]
        words += ["--max-resident-versions", str(max_resident_versions)]
        words += [] if settings.enforce_eager else ["--graphs"]
        words += ["--sleep"] if sleep else []
        words += ["--args", json.dumps(settings.args)] if settings.args else []
        report, theirs = os.pipe()
        key = secrets.token_urlsafe(KEY_BYTES)
        try:
            process = subprocess.Popen(
                [*words, "--report", str(theirs)],
                stdin=subprocess.PIPE,
                pass_fds=(theirs,),
                env={**os.environ, KEY_VARIABLE: key},
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        server = cls(process, report, key)
        try:
            server._wait(time.monotonic() + START_S)
        except DoraError:
            server.close()
            raise
        return server

    @property
    def pid(self) -> int:
        """Return the server's pid; its engine core is a child."""
        return self._process.pid

    def check(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise ResourceError(f"vLLM's server ended {_how(code)}", hint="see the worker's log")

    def settle(self) -> None:
        """Wait for an exit, then `check`: the connection breaks first."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SETTLE_S)
        self.check()

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with suppress(ProcessLookupError):  # an orphaned engine core
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._report >= 0:
            os.close(self._report)
            self._report = -1

    def _wait(self, until_s: float) -> None:
        report = self._read_report(until_s)
        if "port" not in report:
            self._refused(report)
        self.address = Address(host="127.0.0.1", port=int(report["port"]), key=self._key)
        while time.monotonic() < until_s:
            self.check()
            with suppress(ResourceError):  # it listens once its model is built
                call(self.address, "GET", HEALTH, timeout_s=START_S)
                return
            time.sleep(ASK_S)
        raise ResourceError(f"vLLM's server did not start within {START_S:.0f} s")

    def _read_report(self, until_s: float) -> dict[str, str]:
        line = b""
        while not line.endswith(b"\n"):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._report], [], [], left_s)[0]:
                raise ResourceError(f"vLLM's server did not start within {START_S:.0f} s")
            part = os.read(self._report, REPORT_BYTES_MAX)
            if not part:
                self._process.wait(STOP_S)
                self.check()
            line += part
        report: dict[str, str] = json.loads(line)
        return report

    def _refused(self, report: dict[str, str]) -> None:
        kinds = {kind.exit_code: kind for kind in (PolicyError, ConfigError)}
        kind = kinds.get(int(report["exit_code"]), ResourceError)
        raise kind(report["error"])


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

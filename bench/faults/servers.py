"""Two servers of a task for kill rounds, as `dora-pipe task serve` has them on other machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from dora_pipe.bench.faults.episodes import HERE, SERVED
from dora_pipe.core.errors import ResourceError

COUNT: Final = 2
PROCESSES: Final = 8
"""Of one server: all connections of both workers, while the other server is down."""

READY_S: Final = 60.0
POLL_S: Final = 0.05

_CALL: Final = "from dora_pipe.cli.main import main; main()"
_CONFIG: Final = f"""
[run]
name = "served"
steps = 1
[model]
path = "model"
[task]
name = "{SERVED}"
kind = "{HERE}:Walks"
"""


class Servers:
    """Servers at fixed ports. One that was struck is started again by `mend`, when it is due.

    Example: ``with closing(Servers(folder)) as servers: servers.start()``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.token_file = folder / "token"
        self.token_file.write_text(os.urandom(16).hex())
        (folder / "served.toml").write_text(f'{_CONFIG}url_token_file = "{self.token_file}"\n')
        self._ports = [_free_port() for _ in range(COUNT)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * COUNT
        self._due_s: dict[int, float] = {}
        """Servers that are down, and when (monotonic seconds) each is started again."""
        self._lock = threading.Lock()

    @property
    def urls(self) -> list[str]:
        """As `task.url`."""
        return [f"tcp://127.0.0.1:{port}" for port in self._ports]

    def start(self) -> None:
        """Start what is down and return when all listen. Raises ResourceError."""
        with self._lock:
            self._due_s.clear()
            for which in range(COUNT):
                if self.pid(which) is None:
                    self._launch(which)
        until_s = time.monotonic() + READY_S
        while not all(map(_listens, self._ports)):
            if time.monotonic() > until_s:
                raise ResourceError("a server of tasks does not listen", hint=str(self._folder))
            time.sleep(POLL_S)

    def pid(self, which: int) -> int | None:
        """Of a server that runs."""
        process = self._processes[which]
        return None if process is None or process.poll() is not None else process.pid

    def strike(self, which: int, *, down_s: float) -> int | None:
        """Kill -9 a server; it stays down for so long."""
        with self._lock:
            pid = self.pid(which)
            process = self._processes[which]
            if pid is None or process is None:
                return None
            process.send_signal(signal.SIGKILL)
            process.wait()
            self._due_s[which] = time.monotonic() + down_s
            return pid

    def mend(self) -> None:
        """Start again what has been down for long enough; does not wait until it listens."""
        now_s = time.monotonic()
        with self._lock:
            for which in [which for which, due_s in self._due_s.items() if due_s <= now_s]:
                del self._due_s[which]
                self._launch(which)

    def close(self) -> None:
        """Kill what runs."""
        for process in self._processes:
            if process is not None:
                process.kill()
                process.wait()

    def _launch(self, which: int) -> None:
        address = f"127.0.0.1:{self._ports[which]}"
        words = ["task", "serve", "served.toml", "--listen", address]
        with (self._folder / f"server-{which}.log").open("ab") as log:
            self._processes[which] = subprocess.Popen(
                [sys.executable, "-c", _CALL, *words, "--processes", str(PROCESSES)],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True

"""Task server in a separate process."""

import os
import re
import signal
import subprocess
from pathlib import Path

from dora_pipe.producers.tasks.links import TOKEN_VARIABLE
from tests.support.forked import PROGRAM
from tests.support.task_pool import DEADLINE_S

TOKEN = "a token of thirty-two characters"
CONFIG = """
[run]
name = "played"
steps = 1
[model]
path = "model"
[task]
kind = "odd_task:Odd"
options = {episodes = true}
"""


class Server:
    def __init__(self, folder: Path, *words: str, port: int = 0) -> None:
        self.words = words
        (folder / "played.toml").write_text(CONFIG)
        command = (PROGRAM, "task-server", "played.toml")
        self.process = subprocess.Popen(
            [*command, "--listen", f"127.0.0.1:{port}", *words],
            cwd=folder,
            env={**os.environ, TOKEN_VARIABLE: TOKEN},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        match = re.search(r"serving `odd_task:Odd` at (tcp://127\.0\.0\.1:(\d+))", line)
        assert match, line
        self.url, self.port = match[1], int(match[2])

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode

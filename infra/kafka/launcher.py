"""Brokers in the foreground of a terminal: says which of them dies, and starts it again if asked.

A broker that died is started again by this program, so that Ctrl-C here ends all of them: another
terminal asks for it (`ask_to_start`) by a file in the broker's folder. A lock on the folder of all
says whether somebody is there to read it.
"""

import fcntl
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from infra.kafka.broker import HOST, STOP_LIMIT_S, KafkaBroker, end_all
from infra.kafka.cluster import KafkaCluster
from infra.kafka.jars import BrokerError

LOOK_S = 0.2
"""Between two looks at brokers and requests."""

ASK_LIMIT_S = 10.0
"""For an answer to a request; starting a broker takes longer than being told that it starts."""

LOCK = "launcher.lock"
REQUEST, STARTED, REFUSED = "start", "started", "refused"
"""In a broker's folder: somebody wants it started; a line that says what came of it."""


class Launcher:
    """Runs one broker or three, and watches over them.

    Example: ``with Launcher(KafkaCluster(folder, port=29092), folder, print) as it: it.run([])``
    """

    def __init__(
        self, brokers: KafkaBroker | KafkaCluster, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._brokers = brokers
        self._folder = folder
        self._say = say
        self._nodes = (brokers,) if isinstance(brokers, KafkaBroker) else brokers.nodes
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> "Launcher":
        """Start all. Raises BrokerError."""
        self._lock = _taken(self._folder)
        if self._lock is None:
            raise BrokerError(f"brokers run in {self._folder} already")
        with ExitStack() as undo:
            undo.callback(self._close)
            self._brokers.start()
            for node in self._nodes:
                (node.folder / REQUEST).unlink(missing_ok=True)
            undo.pop_all()
        self._say(f"kafka://{self._brokers.bootstrap}, data in {self._folder}; Ctrl-C stops it")
        if len(self._nodes) > 1:
            for node in self._nodes:
                self._say(f"broker {node.node} at {node.bootstrap} is process {node.pid}")
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        try:
            self._stop()
        except KeyboardInterrupt:
            self._brokers.kill()
            self._say("killed")
        if self._lock is not None:
            self._lock.close()

    def run(self, command: Sequence[str], pressed: Callable[[], bool] | None = None) -> int:
        """Until the command has ended, or without one until no broker is left; the exit status.

        With `pressed` the brokers run on after the command, until that is true: a key was pressed.
        """
        if not command:
            return self._watch(lambda: None)
        words = [word.replace("{bootstrap}", self._brokers.bootstrap) for word in command]
        with subprocess.Popen(words) as process:
            try:
                code = self._watch(process.poll)
            except KeyboardInterrupt:  # Ctrl-C reached the command too
                process.send_signal(signal.SIGINT)
                code = process.wait()
        if pressed is not None and code == 0:
            self._say(f"kafka://{self._brokers.bootstrap} runs on for the log; Enter stops it")
            self._watch(lambda: 0 if pressed() else None)
        self._say(f"the log stays in {self._folder}; to read it, {self._again}")
        return code

    @property
    def _again(self) -> str:
        """How the brokers start again over the same data, under the same address."""
        host, _, port = self._nodes[0].bootstrap.rpartition(":")
        words = f"--folder {self._folder} --port {port}"
        words += f" --brokers {len(self._nodes)}" if len(self._nodes) > 1 else ""
        words += "" if host == HOST else f" --host {host}"
        return f"start the broker again: python -m infra.kafka {words}"

    def _watch(self, ended: Callable[[], int | None]) -> int:
        while (code := ended()) is None:
            for node in self._nodes:
                self._look(node)
            if not any(node.running for node in self._nodes):
                self._say("no broker is left")
                return 1
            time.sleep(LOOK_S)
        return code

    def _look(self, node: KafkaBroker) -> None:
        code = node.ended
        if code is not None:
            node.join()
            self._say(f"broker {node.node} at {node.bootstrap} {_how(code)}{self._then(node)}")
        if (node.folder / REQUEST).exists():
            answer, line = self._start(node)
            self._say(line)
            (node.folder / answer).write_text(line)
            (node.folder / REQUEST).unlink()

    def _start(self, node: KafkaBroker) -> tuple[str, str]:
        if node.running:
            return REFUSED, f"broker {node.node} runs already"
        try:
            node.launch()
        except BrokerError as error:
            return REFUSED, f"broker {node.node} cannot start: {error}"
        return STARTED, f"broker {node.node} at {node.bootstrap} starts again, process {node.pid}"

    def _then(self, node: KafkaBroker) -> str:
        if not any(one.running for one in self._nodes):
            return ""
        words = f"--brokers {len(self._nodes)} --folder {self._folder} --start {node.node}"
        return f"; the others go on. To start it again: python -m infra.kafka {words}"

    def _stop(self) -> None:
        if any(node.running for node in self._nodes):
            self._say(f"stopping; what takes longer than {STOP_LIMIT_S:.0f} s is killed")
        for node in end_all(self._nodes, signal.SIGTERM):
            self._say(f"broker {node.node} did not stop in time: killed")


def ask_to_start(folder: Path, number: int, say: Callable[[str], None]) -> None:
    """Have the program that runs the brokers of a folder start one that died; wait for it.

    Raises BrokerError.
    """
    lock = _taken(folder)
    if lock is not None:
        lock.close()
        raise BrokerError(f"no brokers run in {folder}")
    place = folder / f"node-{number}"
    if not place.is_dir():
        raise BrokerError(f"there is no broker {number} in {folder}")
    request = place / REQUEST
    for name in (STARTED, REFUSED):
        (place / name).unlink(missing_ok=True)
    request.touch()
    until_s = time.monotonic() + ASK_LIMIT_S
    while request.exists():
        if time.monotonic() > until_s:
            request.unlink(missing_ok=True)
            raise BrokerError(f"the program that runs the brokers of {folder} does not answer")
        time.sleep(LOOK_S)
    if (place / REFUSED).exists():
        raise BrokerError((place / REFUSED).read_text())
    say((place / STARTED).read_text())


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed ({signal.Signals(-code).name})"
    return f"was killed (signal {-code})"


def _taken(folder: Path) -> IO[bytes] | None:
    """The lock of a folder, held as long as it is open; None where somebody else has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / LOCK).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock

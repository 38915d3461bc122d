"""Brokers in the foreground of a terminal: `make kafka`, `make kafka-cluster`, `make demo-kafka`.

python -m infra.kafka [--brokers 3] [--host NAME] [--port 9092] [--folder DIR] [-- COMMAND ...]
python -m infra.kafka --tools [--folder DIR]    # Kafka's own commands as scripts for a PATH

`{bootstrap}` in COMMAND becomes the brokers' addresses. Their data is kept for the next time.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.kafka.broker import (
    CACHE,
    HOST,
    NODES,
    BrokerError,
    KafkaBroker,
    KafkaCluster,
    end_all,
    missing_tools,
    write_tools,
)

LOOK_S, RESTART_S = 0.2, 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run brokers until Ctrl-C or the end of COMMAND; return the exit status."""
    options = _parser().parse_args(arguments)
    if missing := missing_tools():
        sys.stderr.write(f"error: {' and '.join(missing)} not found\n")
        sys.stderr.write("hint: Kafka without containers needs Java 17 and Maven\n")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.tools:
            folder = (options.folder or CACHE / "bin").resolve()
            _say(f"{', '.join(write_tools(folder))}\nexport PATH={folder}:$PATH")
            return 0
        return _run(options)
    except KeyboardInterrupt:
        return 0
    except BrokerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.kafka", description=main.__doc__)
    parser.add_argument("--brokers", type=int, choices=(1, NODES), default=1)
    parser.add_argument("--port", type=int, help="first port; 9092, of three brokers 29092")
    parser.add_argument("--host", default=HOST, help="name of this machine for other machines")
    parser.add_argument("--folder", type=Path, help="folder of the data")
    parser.add_argument("--tools", action="store_true", help="write Kafka's own commands")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    return parser


def _run(options: argparse.Namespace) -> int:
    single = options.brokers == 1
    folder = options.folder or CACHE / ("single" if single else "cluster")
    brokers: KafkaBroker | KafkaCluster = KafkaCluster(folder, port=options.port or 29_092)
    if single:
        brokers = KafkaBroker(folder, port=options.port or 9_092, host=options.host)
    try:
        brokers.start()
        _say(f"kafka://{brokers.bootstrap}, data in {folder}; Ctrl-C stops it")
        for node in brokers.nodes:
            _say(f"broker {node.node} at {node.bootstrap} is process {node.pid}")
        if not options.command:
            return _watch(brokers.nodes, lambda: None)
        words = [word.replace("{bootstrap}", brokers.bootstrap) for word in options.command]
        with subprocess.Popen(words) as process:
            return _watch(brokers.nodes, process.poll)
    finally:
        for node in end_all(brokers.nodes, signal.SIGTERM):
            _say(f"broker {node.node} did not stop in time: killed")


def _watch(nodes: Sequence[KafkaBroker], ended: Callable[[], int | None]) -> int:
    """Start a broker that died again after a while, until `ended` gives a status."""
    due: dict[int, float] = {}
    while (code := ended()) is None:
        for node in nodes:
            if node.ended is not None:
                _say(f"broker {node.node} ended ({node.ended}); it starts again in {RESTART_S:g} s")
                node.join()
                due[node.node] = time.monotonic() + RESTART_S
            if due.get(node.node, float("inf")) < time.monotonic():
                del due[node.node]
                node.launch()
                _say(f"broker {node.node} at {node.bootstrap} is process {node.pid}")
        time.sleep(LOOK_S)
    return code


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

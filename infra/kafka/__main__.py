"""`make kafka` and `make kafka-cluster`: brokers in the foreground, or around one command.

python -m infra.kafka [--brokers 3] [--port 9092] [--folder DIR] [-- COMMAND {bootstrap} ...]
"""

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from infra.kafka.broker import KafkaBroker
from infra.kafka.cluster import NODES, KafkaCluster
from infra.kafka.jars import CACHE, BrokerError, missing_tools

PORT = 9092
CLUSTER_PORT = 29092
"""The ports of infra/docker-compose.yml."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run brokers on fixed ports until Ctrl-C and keep their data; with a COMMAND, on free ports
    until it ends, and keep nothing. `{bootstrap}` in COMMAND becomes their addresses."""
    options = _parser().parse_args(arguments)
    missing = missing_tools()
    if missing:
        sys.stderr.write(f"error: {' and '.join(missing)} not found\n")
        sys.stderr.write("hint: a broker without containers needs Java 17 and Maven\n")
        return 1
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _around(options) if options.command else _foreground(options)
    except KeyboardInterrupt:
        return 0
    except BrokerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.kafka", description=main.__doc__)
    parser.add_argument("--brokers", type=int, choices=(1, NODES), default=1)
    parser.add_argument("--port", type=int, help=f"the first; {PORT}, a cluster's {CLUSTER_PORT}")
    parser.add_argument("--folder", type=Path, help="where data lies")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    return parser


def _foreground(options: argparse.Namespace) -> int:
    single = options.brokers == 1
    folder = options.folder or CACHE / ("single" if single else "cluster")
    port = options.port or (PORT if single else CLUSTER_PORT)
    brokers = KafkaBroker(folder, port=port) if single else KafkaCluster(folder, port=port)
    try:
        brokers.start()
        sys.stdout.write(f"kafka://{brokers.bootstrap}, data in {folder}; Ctrl-C stops it\n")
        sys.stdout.flush()
        return _members(brokers)[0].wait()
    finally:
        brokers.stop()


def _around(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        folder = options.folder or stack.enter_context(tempfile.TemporaryDirectory())
        make = KafkaBroker if options.brokers == 1 else KafkaCluster
        brokers = stack.enter_context(make(Path(folder), port=options.port))
        words = [word.replace("{bootstrap}", brokers.bootstrap) for word in options.command]
        with subprocess.Popen(words) as process:
            try:
                return process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
                return process.wait()


def _members(brokers: KafkaBroker | KafkaCluster) -> Sequence[KafkaBroker]:
    return (brokers,) if isinstance(brokers, KafkaBroker) else brokers.nodes


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

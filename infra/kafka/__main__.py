"""`make kafka`, `make kafka-cluster`, `make demo-kafka`: brokers in the foreground of a terminal.

python -m infra.kafka [--brokers 3] [--port 9092] [--folder DIR] [-- COMMAND {bootstrap} ...]
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from infra.kafka.broker import KafkaBroker
from infra.kafka.cluster import NODES, KafkaCluster
from infra.kafka.jars import CACHE, BrokerError, missing_tools

PORT = 9092
CLUSTER_PORT = 29092
"""The ports of infra/docker-compose.yml."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run brokers until Ctrl-C, or until COMMAND ends; their data is kept for the next time.

    `{bootstrap}` in COMMAND becomes their addresses.
    """
    options = _parser().parse_args(arguments)
    missing = missing_tools()
    if missing:
        sys.stderr.write(f"error: {' and '.join(missing)} not found\n")
        sys.stderr.write("hint: a broker without containers needs Java 17 and Maven\n")
        return 1
    signal.signal(signal.SIGTERM, _interrupt)
    single = options.brokers == 1
    folder = options.folder or CACHE / ("single" if single else "cluster")
    port = options.port or (PORT if single else CLUSTER_PORT)
    brokers = KafkaBroker(folder, port=port) if single else KafkaCluster(folder, port=port)
    try:
        brokers.start()
        _say(f"kafka://{brokers.bootstrap}, data in {folder}; Ctrl-C stops it")
        if options.command:
            code = _run(options.command, brokers.bootstrap)
            _say(f"the log stays in {folder}")
            return code
        return brokers.wait()
    except KeyboardInterrupt:
        return 0
    except BrokerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    finally:
        brokers.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.kafka", description=main.__doc__)
    parser.add_argument("--brokers", type=int, choices=(1, NODES), default=1)
    parser.add_argument("--port", type=int, help=f"the first; {PORT}, a cluster's {CLUSTER_PORT}")
    parser.add_argument("--folder", type=Path, help="where data lies")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    return parser


def _run(command: Sequence[str], bootstrap: str) -> int:
    words = [word.replace("{bootstrap}", bootstrap) for word in command]
    with subprocess.Popen(words) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:  # Ctrl-C reached the command too
            process.send_signal(signal.SIGINT)
            return process.wait()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

"""`make kafka`, `make kafka-cluster`, `make demo-kafka`: brokers in the foreground of a terminal.

python -m infra.kafka [--host NAME] [--port 9092] [--folder DIR] [-- COMMAND {bootstrap} ...]
python -m infra.kafka --brokers 3 [--port 29092] [--folder DIR] [-- COMMAND {bootstrap} ...]
python -m infra.kafka --brokers 3 [--folder DIR] --start 2
"""

import argparse
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from infra.kafka.broker import HOST, KafkaBroker
from infra.kafka.cluster import NODES, KafkaCluster
from infra.kafka.jars import CACHE, BrokerError, missing_tools
from infra.kafka.launcher import Launcher, ask_to_start

PORT = 9092
CLUSTER_PORT = 29092
"""The ports of infra/docker-compose.yml."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run brokers until Ctrl-C, or until COMMAND ends; their data is kept for the next time.

    `{bootstrap}` in COMMAND becomes their addresses. A broker that dies is told, the others go on.
    With --start N nothing is run: the program that runs the brokers starts that one again.
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
    if not single and options.host != HOST:
        sys.stderr.write("error: --host is for one broker\n")
        sys.stderr.write("hint: three brokers on one machine are there to be tried on it\n")
        return 2
    brokers: KafkaBroker | KafkaCluster = KafkaCluster(folder, port=port)
    if single:
        brokers = KafkaBroker(folder, port=port, host=options.host)
    try:
        if options.start:
            ask_to_start(folder, options.start, say)
            return 0
        with Launcher(brokers, folder, say) as launcher:
            return launcher.run(options.command, _pressed if _is_terminal() else None)
    except KeyboardInterrupt:
        return 0
    except BrokerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.kafka", description=main.__doc__)
    parser.add_argument("--brokers", type=int, choices=(1, NODES), default=1)
    parser.add_argument("--port", type=int, help=f"the first; {PORT}, a cluster's {CLUSTER_PORT}")
    parser.add_argument(
        "--host", default=HOST, help=f"this machine's name where others are to come; {HOST}"
    )
    parser.add_argument("--folder", type=Path, help="where data lies")
    parser.add_argument("--start", type=int, metavar="N", help="start broker N again, that died")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    return parser


def say(line: str) -> None:
    """A line for whoever looks on."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _pressed() -> bool:
    """Whether a line was typed, or nobody can type any more."""
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

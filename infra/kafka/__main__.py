"""Brokers in the foreground of a terminal: `make kafka`, `make kafka-cluster`, `make demo-kafka`.

python -m infra.kafka [--brokers 3] [--host NAME] [--port 9092] [--folder DIR] [-- COMMAND ...]

`{bootstrap}` in COMMAND becomes the brokers' addresses. Their data is kept for the next time.
"""

import argparse
import signal
import subprocess
import sys
import threading
from pathlib import Path

from infra.kafka import broker as kafka


def main() -> int:
    """Run brokers until Ctrl-C or the end of COMMAND; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m infra.kafka", description=main.__doc__)
    parser.add_argument("--brokers", type=int, choices=(1, kafka.NODES), default=1)
    parser.add_argument("--port", type=int, help="first port; 9092, of three brokers 29092")
    parser.add_argument("--host", default=kafka.HOST, help="host name for other machines")
    parser.add_argument("--folder", type=Path, help="folder of the data")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        if missing := kafka.missing_tools():
            raise kafka.BrokerError(f"{' and '.join(missing)} not found; needs Java 17 and Maven")
        return _run(options)
    except KeyboardInterrupt:
        return 0
    except kafka.BrokerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _run(options: argparse.Namespace) -> int:
    single = options.brokers == 1
    folder = (options.folder or kafka.CACHE / ("single" if single else "cluster")).resolve()
    brokers: kafka.Brokers = (
        kafka.KafkaBroker(folder, options.port or 9_092, host=options.host)
        if single
        else kafka.KafkaCluster(folder, options.port or 29_092)
    )
    try:
        brokers.start()
        sys.stdout.write(f"kafka://{brokers.bootstrap}, data in {folder}; Ctrl-C stops it\n")
        sys.stdout.flush()
        if not options.command:
            threading.Event().wait()
        words = [word.replace("{bootstrap}", brokers.bootstrap) for word in options.command]
        return subprocess.run(words).returncode
    finally:
        brokers.stop()


if __name__ == "__main__":
    sys.exit(main())

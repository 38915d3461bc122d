"""Decides which of Kafka's commands are at hand without Kafka: `make kafka-tools`.

Kafka's own programs from Maven's jars, under the names that docs/ use:

python -m infra.kafka.tools [FOLDER]      # then: export PATH=FOLDER:$PATH
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.kafka.jars import CACHE, HERE, BrokerError, jars, missing_tools

CLASSES: Mapping[str, str] = {
    "kafka-acls.sh": "org.apache.kafka.tools.AclCommand",
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
    "kafka-delete-records.sh": "org.apache.kafka.tools.DeleteRecordsCommand",
    "kafka-features.sh": "org.apache.kafka.tools.FeatureCommand",
    "kafka-reassign-partitions.sh": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
}
"""Kafka's scripts and what they start; as in the archive that Kafka is published as."""

JVM = (
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}",
)


def write_scripts(folder: Path) -> list[Path]:
    """A script for each of `CLASSES`, for a PATH. Raises BrokerError without the jars."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, started in CLASSES.items():
        path = folder / name
        words = shlex.join(["java", *JVM, "-cp", f"{jars()}/*", started])
        path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        path.chmod(0o755)
        written.append(path)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the scripts and say how to find them."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    folder = Path(words[0] if words else CACHE / "bin").resolve()
    missing = missing_tools()
    if missing:
        sys.stderr.write(f"error: {' and '.join(missing)} not found\n")
        sys.stderr.write("hint: Kafka's tools need Java 17, and Maven to get them\n")
        return 1
    try:
        names = [path.name for path in write_scripts(folder)]
    except BrokerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{', '.join(names)}\nexport PATH={folder}:$PATH\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

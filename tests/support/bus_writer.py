"""Process that appends until it is killed, fenced, or done.

    python -m tests.support.bus_writer URL TOPIC PARTITION WHO BATCH COUNT [EXCLUSIVE]

Prints `ready` and waits for a line. Then appends COUNT batches of BATCH records `WHO call index`,
and prints each acknowledged call's number, `fenced`, or `unknown`.
"""

import sys

from dora_pipe.bus import open_bus
from dora_pipe.core.errors import Fenced, OutcomeUnknown
from dora_pipe.core.pure.records import Append


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    url, topic, partition, who, batch, count, *exclusive = arguments
    bus = open_bus(url)
    writer = bus.writer(exclusive=exclusive[0] if exclusive else None)
    say("ready")
    sys.stdin.readline()
    for call in range(int(count)):
        texts = [f"{who} {call} {i}" for i in range(int(batch))]
        records = [
            Append(topic=topic, partition=int(partition), value=text.encode(), key=who.encode())
            for text in texts
        ]
        try:
            writer.append(records)
        except Fenced:
            say("fenced")
            break
        except OutcomeUnknown:
            say("unknown")
            break
        say(str(call))
    bus.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One process of the bench: `python -m dora_pipe.bench.dataplane.child TASK`; decides nothing."""

from __future__ import annotations

import gc
import logging
import sys
from typing import Final

from dora_pipe.bench.dataplane.assemble import assemble
from dora_pipe.bench.dataplane.consume import consume
from dora_pipe.bench.dataplane.layer import run_layer
from dora_pipe.bench.dataplane.peers import PEERS
from dora_pipe.bench.dataplane.process import TASK, Assemble, Done, Inside, Publish, Task
from dora_pipe.bench.dataplane.publish import publish
from dora_pipe.core.errors import DoraError

COLLECT_AFTER: Final = (50_000, 20, 100)
"""As the roles have it: Python's collector of cycles looks rarely."""


def run(task: Task, inside: Inside) -> Done:
    """Do what the task says."""
    if isinstance(task, Publish):
        return publish(task, inside)
    if isinstance(task, Assemble):
        peer = task.address.partition(":")[0] in PEERS
        return consume(task, inside) if peer else assemble(task, inside)
    return run_layer(task, inside)


def main() -> int:
    """Do the one task of this process."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    gc.set_threshold(*COLLECT_AFTER)
    inside = Inside()
    try:
        inside.answer(run(TASK.decode(sys.argv[1]), inside))
    except DoraError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How running requests go on under new weights, in a run that lets a trajectory mix versions.

The engine keeps its rows and prefills them again; what it had sampled comes before `WeightsLoaded`.
Every stay is a segment with the version that sampled it, so a load ends the stay of each running
request and begins the next. A request may run under every version from its own on, and versions
only grow: a worker is never assigned an older one while it has such requests.

An evaluation is of one version also here: it keeps its worker at that until it has ended.
"""

from __future__ import annotations

from dora_pipe.producers.requests import Requests
from dora_pipe.producers.rows import Hosted, Phase
from dora_pipe.runtime import Now


def reloaded(book: Requests, hosted: Hosted, now: Now) -> None:
    """The engine has another version from now on, and goes on with all that runs."""
    book.hosted = hosted
    setup = book.setup
    for row in book.rows.values():
        if row.phase is Phase.RUNNING:
            row.sequence.reload(
                now.wall_ns, worker=setup.worker, epoch=setup.epoch, version=row.hosted.version
            )
            row.under(hosted)

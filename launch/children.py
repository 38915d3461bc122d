"""Works that need torch, each in a child of a process that has imported it for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from dora_pipe.core.console import complain
from dora_pipe.core.errors import DoraError
from dora_pipe.launch.fork_server import Ended, ForkServer
from dora_pipe.launch.roles import TRAINER_PRELOAD
from dora_pipe.launch.supervisor import RunFailed
from dora_pipe.producers.engines.registry import engine_kind


def share_cores() -> None:
    """Before torch is imported: its threads spin for microseconds only while they wait for each
    other. By default they spin for longer than a pass takes: beside other work two of them are
    ten times slower than one. Were they to sleep at once, two would be no faster than one."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


class Children:
    """Works that need torch, each in a child: this process goes on to fork roles.

    What they are forked from imports torch once, for all of them, and for roles: a name that is
    none of a work is that of a role.
    """

    def __init__(
        self,
        works: Mapping[str, Callable[[], None]],
        *,
        preload: Sequence[str] = (*TRAINER_PRELOAD, *engine_kind("torch").preload),
        role: Callable[[str], int] | None = None,
    ) -> None:
        self._works, self._role = works, role
        share_cores()
        self.fork_server = ForkServer(self._work, preload=preload)

    def run(self, name: str) -> None:
        """Wait until this work is done. Raises RunFailed with its exit code."""
        self.fork_server.spawn(name)
        while True:
            for report in self.fork_server.reports(1.0):
                if isinstance(report, Ended):
                    if report.code:
                        raise RunFailed(f"the {name} failed", code=report.code)
                    return

    def close(self) -> None:
        """Let go of the process with torch."""
        self.fork_server.close()

    def _work(self, name: str) -> int:
        if self._role is not None and name not in self._works:
            return self._role(name)
        try:
            self._works[name]()
        except DoraError as error:
            complain(error)
            return error.exit_code
        return 0

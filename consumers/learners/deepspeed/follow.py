"""A rank of a trainer that is not rank 0: it does what rank 0 commands until that ends.

It decides nothing and takes no part in the run: it appends nothing to the log.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from dora_pipe.bus.port import TopicPartition
from dora_pipe.consumers.learners.deepspeed import prepare
from dora_pipe.consumers.learners.deepspeed.commands import (
    EndRanks,
    Finish,
    Keep,
    LeaveDevice,
    Load,
    LoadBase,
    Open,
    RankCommand,
    Read,
    ShareCommand,
)
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import name_process
from dora_pipe.core.errors import DoraError
from dora_pipe.core.retry import retry_bus
from dora_pipe.core.run_lifecycle import run_is_over, wait_for_run
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.log_location import LogLocation
from dora_pipe.store.store import PolicyStore

if TYPE_CHECKING:
    from dora_pipe.consumers.learners.deepspeed.rank import Rank
    from dora_pipe.consumers.learners.deepspeed.rank_group import RankGroup

ORPHAN_EVERY_S: Final = 0.5
"""How often a rank looks whether rank 0 is still there."""


def follow_environment(device: str, log: LogLocation, store: PolicyStore) -> bool:
    """Be the rank that the environment says, with this machine's way to the log and to the
    policies; there is nothing to be in a run that is over.

    False where the environment names none. Raises ConfigError, UsageError when the run does not
    start, BusError, ResourceError when the other ranks do not come or are lost.
    """
    from dora_pipe.consumers.learners.deepspeed.rank_group import RankGroup, environment_rank

    prepare(device)
    info = environment_rank()
    if info is None:
        return False
    if _is_over(log):
        return True
    group = RankGroup(info, device)
    group.join()
    # All ranks are told to stop at once, but rank 0 ends its step first, with everybody.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Follower(group, log, store).run()
    return True


def _is_over(log: LogLocation) -> bool:
    """Whether rank 0 would not come any more."""
    topics, clock = Topics(log.run), SystemClock()
    with closing(log.open()) as bus:
        wait_for_run(bus, topics, lambda: False, clock)
        at = TopicPartition(topics.decisions, 0)
        end = retry_bus("looking for the last round", lambda: bus.end(at), clock)
        return run_is_over(bus, topics, end, clock)


class Follower:
    """Obeys rank 0. `log` and `store` are this machine's; None: rank 0's are here too."""

    def __init__(
        self, group: RankGroup, log: LogLocation | None = None, store: PolicyStore | None = None
    ) -> None:
        self._group = group
        self._log = log
        self._store = store
        self._ranks: dict[int, Rank] = {}

    def run(self) -> None:
        """Until rank 0 says so. Raises ResourceError when it is lost."""
        while True:
            command = self._group.receive()
            for number in command.retired:
                self._ranks.pop(number).close()
            if isinstance(command, EndRanks):
                return
            self._obey(command)

    def _obey(self, command: RankCommand) -> None:
        if isinstance(command, Open):
            from dora_pipe.consumers.learners.deepspeed.rank import Rank

            if self._log is not None:
                command = msgspec.structs.replace(command, log=self._log)
            self._ranks[command.learner] = Rank(self._group, command, self._store)
            return
        rank = self._ranks[command.learner]
        if isinstance(command, LoadBase):
            rank.load_base()
        elif isinstance(command, Load):
            rank.load(command)
        elif isinstance(command, Read):
            for _ in rank.read(moments=command.moments):
                pass
        elif isinstance(command, Finish):
            rank.finish(command)
        elif isinstance(command, Keep):
            rank.keep(command)
        elif isinstance(command, LeaveDevice):
            rank.leave_device()
        elif isinstance(command, ShareCommand):
            self._compute(rank, command)

    def _compute(self, rank: Rank, command: ShareCommand) -> None:
        ready, trajectories = rank.fetch(command)
        self._group.reply(ready)
        if self._group.agree(good=False):
            self._group.reply(rank.compute(command, trajectories))


def _watch(parent: int, folder: Path) -> None:
    """Nobody else would end a rank whose rank 0 was killed while it computes."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_EVERY_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main(words: list[str]) -> int:
    """``RANK RANKS RENDEZVOUS DEVICE PARENT``: as rank 0 of this machine starts it."""
    rank, ranks, rendezvous, device, parent = words
    name_process("trainer rank", rank)
    threading.Thread(
        target=_watch, args=(int(parent), Path(rendezvous).parent), name="orphan", daemon=True
    ).start()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s trainer rank {rank} %(levelname)s %(message)s",
    )
    prepare(device)
    from dora_pipe.consumers.learners.deepspeed.rank_group import RankGroup, RankInfo

    info = RankInfo(rank=int(rank), ranks=int(ranks), local_rank=int(rank), rendezvous=rendezvous)
    try:
        group = RankGroup(info, device)
        group.join()
        Follower(group).run()
    except DoraError as error:
        sys.stderr.write(f"trainer rank {rank}: {error.message}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main(sys.argv[1:]))  # no teardown of groups that rank 0 has left

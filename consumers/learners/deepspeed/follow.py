"""Process of a rank above 0, which executes rank 0's commands."""

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
from dora_pipe.core.errors import DoraError
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.loop.run_lifecycle import run_is_over, wait_for_run
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import name_process
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.log_location import LogLocation
from dora_pipe.store.store import PolicyStore

if TYPE_CHECKING:
    from dora_pipe.consumers.learners.deepspeed.rank import Rank
    from dora_pipe.consumers.learners.deepspeed.rank_group import RankGroup

ORPHAN_EVERY_S: Final = 0.5


def follow_environment(device: str, log: LogLocation, store: PolicyStore) -> bool:
    """Run as the rank that the environment names, if any; return whether it did. Raises
    ConfigError, UsageError, BusError, ResourceError if ranks are missing or lost."""
    from dora_pipe.consumers.learners.deepspeed.rank_group import RankGroup, environment_rank

    prepare(device)
    info = environment_rank()
    if info is None:
        return False
    if _is_over(log):
        return True
    group = RankGroup(info, device)
    group.join()
    # Ignore stop signals: rank 0 ends its step first, then all ranks.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Follower(group, log, store).run()
    return True


def _is_over(log: LogLocation) -> bool:
    topics, clock = Topics(log.run), SystemClock()
    with closing(log.open()) as bus:
        wait_for_run(bus, topics, lambda: False, clock)
        partition = TopicPartition(topics.decisions, 0)
        end = retry_bus("looking for the last round", lambda: bus.end(partition), clock)
        return run_is_over(bus, topics, end, clock)


class Follower:
    """Executes rank 0's commands; `log` and `store` replace rank 0's."""

    def __init__(
        self, group: RankGroup, log: LogLocation | None = None, store: PolicyStore | None = None
    ) -> None:
        self._group = group
        self._log = log
        self._store = store
        self._ranks: dict[int, Rank] = {}

    def run(self) -> None:
        """Execute commands until the end. Raises ResourceError if rank 0 is lost."""
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
    """Exit if rank 0 died: nothing else ends a rank that is computing."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_EVERY_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main(words: list[str]) -> int:
    """Run a rank started by rank 0: ``RANK RANKS RENDEZVOUS DEVICE PARENT``."""
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
    os._exit(main(sys.argv[1:]))  # skip teardown of groups that rank 0 has left

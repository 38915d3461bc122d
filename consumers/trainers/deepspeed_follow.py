"""A rank of a trainer that is not rank 0: it does what rank 0 orders until that ends.

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
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from dora_pipe.consumers.trainers.deepspeed_orders import (
    AnyOrder,
    End,
    Load,
    LoadBase,
    Open,
    Read,
    Train,
)
from dora_pipe.consumers.trainers.deepspeed_package import prepare
from dora_pipe.errors import DoraError
from dora_pipe.policies.log_place import LogPlace
from dora_pipe.policies.store import PolicyStore

if TYPE_CHECKING:
    from dora_pipe.consumers.trainers.deepspeed_rank import Rank
    from dora_pipe.consumers.trainers.deepspeed_team import Team

ORPHAN_EVERY_S: Final = 0.5
"""How often a rank looks whether rank 0 is still there."""


def follow_torchrun(device: str, log: LogPlace, store: PolicyStore) -> bool:
    """Be the rank that torchrun says, with this machine's way to the log and to the policies.

    False where torchrun did not start this process. Raises ConfigError, ResourceError when the
    other ranks are lost.
    """
    from dora_pipe.consumers.trainers.deepspeed_team import Team, torchrun_seat

    prepare(device)
    seat = torchrun_seat()
    if seat is None:
        return False
    # Torchrun tells all ranks to stop at once, but rank 0 ends its step first, with everybody.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    team = Team(seat, device)
    team.join()
    Follower(team, log, store).run()
    return True


class Follower:
    """Obeys rank 0. `log` and `store` are this machine's; None: rank 0's are here too."""

    def __init__(
        self, team: Team, log: LogPlace | None = None, store: PolicyStore | None = None
    ) -> None:
        self._team = team
        self._log = log
        self._store = store
        self._ranks: dict[int, Rank] = {}

    def run(self) -> None:
        """Until rank 0 says so. Raises ResourceError when it is lost."""
        while True:
            order = self._team.receive()
            for number in order.retired:
                self._ranks.pop(number).close()
            if isinstance(order, End):
                return
            self._obey(order)

    def _obey(self, order: AnyOrder) -> None:
        if isinstance(order, Open):
            from dora_pipe.consumers.trainers.deepspeed_rank import Rank

            if self._log is not None:
                order = msgspec.structs.replace(order, log=self._log)
            self._ranks[order.trainer] = Rank(self._team, order, self._store)
            return
        rank = self._ranks[order.trainer]
        if isinstance(order, LoadBase):
            rank.load_base()
        elif isinstance(order, Load):
            rank.load(order)
        elif isinstance(order, Read):
            for _ in rank.read(moments=order.moments):
                pass
        elif isinstance(order, Train):
            self._train(rank, order)

    def _train(self, rank: Rank, order: Train) -> None:
        ready, trajectories = rank.fetch(order)
        self._team.reply(ready)
        if self._team.agree(good=False):
            self._team.reply(rank.train(order, trajectories))


def _watch(parent: int, folder: Path) -> None:
    """Nobody else would end a rank whose rank 0 was killed while it computes."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_EVERY_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main(words: list[str]) -> int:
    """``RANK RANKS RENDEZVOUS DEVICE PARENT``: as rank 0 of this machine starts it."""
    rank, ranks, rendezvous, device, parent = words
    threading.Thread(
        target=_watch, args=(int(parent), Path(rendezvous).parent), name="orphan", daemon=True
    ).start()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s trainer rank {rank} %(levelname)s %(message)s",
    )
    prepare(device)
    from dora_pipe.consumers.trainers.deepspeed_team import Seat, Team

    seat = Seat(rank=int(rank), ranks=int(ranks), local_rank=int(rank), rendezvous=rendezvous)
    try:
        team = Team(seat, device)
        team.join()
        Follower(team).run()
    except DoraError as error:
        sys.stderr.write(f"trainer rank {rank}: {error.message}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main(sys.argv[1:]))  # no teardown of groups that rank 0 has left

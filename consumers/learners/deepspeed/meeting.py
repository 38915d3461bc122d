"""How ranks of several machines meet at rank 0, and how they hear that one of them was lost.

They meet at a store that rank 0 serves, within a bound. There a rank leaves its mark. One that was
lost and started again finds the mark of its predecessor: the others have not noticed, for between
two steps nobody waits for it. It says so in the store, where all of them look now and then, and
all begin anew. A store that does not answer is that of a machine that is gone.
torchrun hides exit codes of ranks, and its rendezvous reads pickled state from an open port.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from dora_pipe.core.errors import ResourceError

MEET_S: Final = 600.0
"""Ranks wait so long for each other: a machine may have to be found and an image fetched."""

ANSWER_S: Final = 60.0
"""The store of rank 0 has so long to answer."""

LOOK_S: Final = 1.0
"""How often a rank looks whether one was lost."""

LOST: Final = "lost"

_STORE: Any = dist  # which exports its stores without saying so


class Meeting:
    """The store of rank 0, and a look at it; see the module.

    Example: ``Meeting("10.0.0.7", 29400, rank=1, ranks=2).store``
    """

    def __init__(
        self, host: str, port: int, *, rank: int, ranks: int, wait_s: float = MEET_S
    ) -> None:
        """Raises ResourceError where they do not meet, or meet ranks that had this one before."""
        self._at, self._rank = f"{host}:{port}", rank
        self.lost = ""
        """Which rank was lost, in words."""
        try:
            self.store = _STORE.TCPStore(
                host, port, ranks, is_master=rank == 0, timeout=timedelta(seconds=wait_s)
            )
        except dist.DistError as error:
            raise ResourceError(
                f"the trainer's {ranks} ranks did not meet at {self._at} within {wait_s:g} s: "
                f"{str(error).partition(chr(10))[0]}",
                hint="the same command on every node, with --node 0, 1, ...; --rendezvous is an "
                "address of node 0 that all nodes reach, and a port that is free there",
            ) from error
        if self.store.add(f"rank {rank}", 1) > 1:
            self.store.set(LOST, str(rank))
            raise ResourceError(
                f"rank {rank} of the trainer was lost and comes to ranks that go on without it: "
                "all of them begin anew"
            )

    def watch(self, lost: Callable[[], None]) -> None:
        """Look at the store from now on; `lost` is called once, in a thread, when `lost` says who
        was. Raises ResourceError where there is no store any more."""
        host, _, port = self._at.rpartition(":")
        try:
            store = _STORE.TCPStore(
                host, int(port), None, is_master=False, timeout=timedelta(seconds=ANSWER_S),
                wait_for_workers=False,
            )  # fmt: skip
        except dist.DistError as error:
            raise ResourceError(f"rank 0 of the trainer is gone: {error}") from error
        threading.Thread(
            target=self._look, args=(store, lost), name="ranks-elsewhere", daemon=True
        ).start()

    def _look(self, store: Any, lost: Callable[[], None]) -> None:
        pause = threading.Event()
        while not self.lost:
            pause.wait(LOOK_S)
            try:
                if store.check([LOST]):
                    number = store.get(LOST).decode()
                    self.lost = f"rank {number} of the trainer was lost, and has come again"
            except dist.DistError:
                self.lost = f"rank 0 of the trainer, at {self._at}, is gone"
        lost()


def meeting_of(rank: int, ranks: int) -> Meeting | None:
    """That of the ranks which the environment names; None under torchrun, which has its own."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return Meeting(host, port, rank=rank, ranks=ranks)

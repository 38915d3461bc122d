"""Rendezvous of ranks on several machines, and detection of lost ranks.

Ranks register in rank 0's store. A restarted rank finds its predecessor's entry and reports it
there; all ranks watch the store and restart. A silent store means rank 0 is lost. Not torchrun: it
hides exit codes, and its rendezvous unpickles state from an open port.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from dora_pipe.core.errors import ResourceError

MEET_S: Final = 600.0
"""Includes allocating machines and pulling images."""

ANSWER_S: Final = 60.0
LOOK_S: Final = 1.0
LOST: Final = "lost"
_STORE: Any = dist  # torch exports its stores without declaring them


class Meeting:
    """Store of rank 0, and its watcher."""

    def __init__(
        self, host: str, port: int, *, rank: int, ranks: int, wait_s: float = MEET_S
    ) -> None:
        """Raises ResourceError if ranks do not meet, or this rank had registered before."""
        self._at, self._rank = f"{host}:{port}", rank
        self.lost = ""
        try:
            self.store = _STORE.TCPStore(
                host, port, ranks, is_master=rank == 0, timeout=timedelta(seconds=wait_s)
            )
        except dist.DistError as error:
            raise ResourceError(
                f"the trainer's {ranks} ranks did not meet at {self._at} within {wait_s:g} s: "
                f"{str(error).partition(chr(10))[0]}",
                hint="run the same command on every node with --node 0, 1, ...; --rendezvous is an "
                "address of node 0 with a free port",
            ) from error
        if self.store.add(f"rank {rank}", 1) > 1:
            self.store.set(LOST, str(rank))
            raise ResourceError(f"rank {rank} of the trainer restarted alone: all ranks restart")

    def watch(self, lost: Callable[[], None]) -> None:
        """Watch the store; call `lost` once, in a thread. Raises ResourceError if the store is
        gone."""
        host, _, port = self._at.rpartition(":")
        try:
            store = _STORE.TCPStore(
                host, int(port), None, is_master=False, timeout=timedelta(seconds=ANSWER_S),
                wait_for_workers=False,
            )  # fmt: skip
        except dist.DistError as error:
            raise ResourceError(f"rank 0 of the trainer was lost: {error}") from error
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
                    self.lost = f"rank {number} of the trainer was lost and has restarted"
            except dist.DistError:
                self.lost = f"rank 0 of the trainer, at {self._at}, is gone"
        lost()

"""Processes of a trainer: start, communication, loss.

Ranks come from the environment (`meeting`), or rank 0 starts them. A lost rank ends the trainer:
only an uncommitted step is lost.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from dora_pipe.consumers.learners.deepspeed.commands import COMMANDS, EndRanks, RankCommand
from dora_pipe.consumers.learners.deepspeed.meeting import Meeting
from dora_pipe.core.errors import ConfigError, ResourceError

COMMAND_TIMEOUT: Final = timedelta(days=7)
"""Batches may be slow; a dead rank 0 is noticed at once."""

STEP_TIMEOUT: Final = timedelta(minutes=30)

LOST_GRACE_S: Final = 10.0
"""Exit if collectives have not failed this long after a rank died."""

WATCH_S: Final = 0.2
STDERR: Final = 2
BUSY_S: Final = 1.0
"""A longer collective is abandoned on exit."""

END_S: Final = 10.0
_ENVIRONMENT: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    rank: int
    ranks: int
    local_rank: int
    rendezvous: str = ""
    """Rendezvous file on one machine; empty: environment."""


def environment_rank() -> RankInfo | None:
    """Return the rank named by the environment, if any. Raises ConfigError."""
    values = [os.environ.get(name) for name in _ENVIRONMENT]
    if not all(values):
        return None
    try:
        rank, ranks = int(values[0] or ""), int(values[1] or "")
        local = int(os.environ.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE or LOCAL_RANK is not a number: {error}") from None
    return RankInfo(rank=rank, ranks=ranks, local_rank=local)


class RankGroup:
    """Rank membership of this process; see `rank_group`."""

    def __init__(self, info: RankInfo, device: str) -> None:
        self.info = info
        self.device = device if device == "cpu" else f"{device}:{info.local_rank}"
        self.backend = "gloo" if device == "cpu" else "nccl"
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._ended = False
        self._meeting: Meeting | None = None
        self._control: Any = None
        self._busy = threading.RLock()

    @property
    def ranks(self) -> int:
        return self.info.ranks

    def start_others(self) -> None:
        """Start and watch the other ranks on this machine."""
        for rank in range(1, self.ranks):
            command = [sys.executable, "-m", "dora_pipe.consumers.learners.deepspeed.follow"]
            device = self.device.partition(":")[0]
            words = [str(rank), str(self.ranks), self.info.rendezvous, device]
            self._children[rank] = subprocess.Popen(
                [*command, *words, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,  # stdout is data
                start_new_session=True,  # Ctrl-C goes to rank 0, which ends its step first
            )
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def join(self) -> None:
        """Join the other ranks. Raises ResourceError if they do not come."""
        # Read by DeepSpeed and torch.
        os.environ["LOCAL_RANK"] = str(self.info.local_rank)
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)
        with self.together():
            self._init()
            if self.ranks > 1:
                self._control = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)

    def _init(self) -> None:
        info = self.info
        stores: Any = dist  # torch exports them without declaring them
        if info.ranks == 1:
            store = stores.HashStore()
        elif info.rendezvous:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = stores.FileStore(info.rendezvous, info.ranks)
        else:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._meeting = Meeting(host, port, rank=info.rank, ranks=info.ranks)
            self._meeting.watch(self._leave)
            store = self._meeting.store
        dist.init_process_group(
            self.backend, rank=info.rank, world_size=info.ranks, timeout=STEP_TIMEOUT, store=store
        )

    # Communication

    def send(self, command: RankCommand) -> None:
        """Send a command to all ranks. Raises ResourceError if one is lost."""
        if self.ranks == 1:
            return
        data = bytearray(msgspec.msgpack.encode(command))
        with self.together():
            dist.broadcast(torch.tensor([len(data)]), 0, group=self._control)
            dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._control)

    def receive(self) -> RankCommand:
        """Return rank 0's next command. Raises ResourceError if it is lost."""
        size = torch.zeros(1, dtype=torch.int64)
        with self.together():
            dist.broadcast(size, 0, group=self._control)
            data = torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._control)
        return COMMANDS.decode(data.numpy().tobytes())

    def reply(self, reply: msgspec.Struct) -> None:
        data = bytearray(msgspec.msgpack.encode(reply))
        with self.together():
            dist.send(torch.tensor([len(data)]), 0, group=self._control)
            dist.send(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._control)

    def replies(self) -> list[bytes]:
        """Return the replies of ranks 1, 2, ...; each must call `reply`. Raises ResourceError."""
        replies: list[bytes] = []
        with self.together():
            for rank in range(1, self.ranks):
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, rank, group=self._control)
                data = torch.zeros(int(size), dtype=torch.uint8)
                dist.recv(data, rank, group=self._control)
                replies.append(data.numpy().tobytes())
        return replies

    def agree(self, good: bool) -> bool:
        """Return rank 0's argument on every rank."""
        word = torch.tensor([int(good)])
        if self.ranks > 1:
            with self.together():
                dist.broadcast(word, 0, group=self._control)
        return bool(word)

    def share(self, tensor: Tensor) -> Tensor:
        """Broadcast rank 0's CPU tensor in place; return it."""
        if self.ranks > 1:
            with self.together():
                dist.broadcast(tensor, 0, group=self._control)
        return tensor

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wrap collectives. Raises ResourceError if a rank is lost or memory runs out."""
        try:
            with self._busy:
                yield
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"out of memory on {self.device}: {error}",
                hint="lower trainer.micro_batch_tokens, or start a new run with more trainer.ranks",
            ) from error
        except RuntimeError as error:
            self._settle()
            lost, broken = self._lost(), _of_wire(error)
            if not lost and not broken:
                raise
            raise ResourceError(lost or f"a rank of the trainer is gone: {broken}") from error

    # Processes

    def end(self) -> None:
        """End the other ranks, waiting for those started here; idempotent."""
        if self._ended:
            return
        self._ended = True
        if self.ranks > 1:
            self._end_others()
        self._forget_rendezvous()

    def _forget_rendezvous(self) -> None:
        if self.info.rendezvous:
            shutil.rmtree(Path(self.info.rendezvous).parent, ignore_errors=True)

    def _end_others(self) -> None:
        idle = not self._lost() and self._busy.acquire(timeout=BUSY_S)
        if idle:
            with suppress(ResourceError):  # a lost one need not end
                self.send(EndRanks(learner=0))
            self._busy.release()
        give_up_s = time.monotonic() + (END_S if idle else 0.0)
        for child in self._children.values():
            try:
                child.wait(max(0.0, give_up_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _watch(self) -> None:
        """Watch the ranks: a GPU collective does not notice a lost rank."""
        while not self._ended:
            if self._lost():
                self._leave()
            time.sleep(WATCH_S)

    def _leave(self) -> None:
        """Exit after a lost rank, unless its error is handled in time."""
        time.sleep(LOST_GRACE_S)
        if not self._ended:
            sys.stderr.write(f"error: {self._lost()}\n")
            sys.stderr.flush()
            self._forget_rendezvous()
            os._exit(ResourceError.exit_code)

    def _settle(self) -> None:
        """Wait briefly: connections close shortly before their process ends."""
        until_s = time.monotonic() + 1.0
        while self._children and not self._lost() and time.monotonic() < until_s:
            time.sleep(WATCH_S / 4)

    def _lost(self) -> str:
        for rank, child in self._children.items():
            code = child.poll()
            if code is not None:
                how = f"ended with exit code {code}"
                if code < 0:
                    how = f"was killed ({signal.Signals(-code).name})"
                return f"rank {rank} of the trainer {how}"
        return self._meeting.lost if self._meeting else ""


def _of_wire(error: RuntimeError) -> str:
    text = str(error)
    for words in ("Connection closed by peer", "Connection reset by peer", "Timed out", "gloo"):
        if words in text:
            return words.lower()
    return text.partition("\n")[0] if isinstance(error, dist.DistError) else ""


_GROUP: list[RankGroup] = []


def rank_group(ranks: int, device: str) -> RankGroup:
    """Return the group of this process, rank 0, created on first use. Raises ConfigError for other
    ranks than configured, ResourceError if they are missing."""
    info = environment_rank()
    there = _GROUP[0].ranks if _GROUP else info.ranks if info else ranks
    if there != ranks:
        who = "this process has" if _GROUP else "the environment names"
        raise ConfigError(
            f"trainer.ranks is {ranks}, but {who} {there}",
            hint="set trainer.ranks to the number of processes",
        )
    if _GROUP:
        return _GROUP[0]
    if device == "cuda":
        _check_gpus(ranks if info is None else int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if info is None:
        folder = tempfile.mkdtemp(prefix="dora-pipe-ranks-") if ranks > 1 else ""
        info = RankInfo(
            rank=0,
            ranks=ranks,
            local_rank=0,
            rendezvous=str(Path(folder) / "ranks") if folder else "",
        )
    assert info.rank == 0, "only rank 0 is the trainer of its run"
    group = RankGroup(info, device)
    if info.rendezvous:
        group.start_others()
    group.join()
    atexit.register(group.end)
    _GROUP.append(group)
    return group


def end_rank_group() -> None:
    for group in _GROUP:
        group.end()


def _check_gpus(count: int) -> None:
    there = torch.cuda.device_count()
    if there < count:
        raise ConfigError(
            f"{count} ranks on this machine need a GPU each, and there are {there}",
            hint="-o trainer.device=cpu, or fewer trainer.ranks in a new run",
        )

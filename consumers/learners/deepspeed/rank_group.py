"""The processes of a trainer: who they are, how they are started, how they hear of each other.

It decides when a rank counts as lost. Two ways lead here: on several nodes the environment names
the ranks and all of them exist already (`meeting`, or torchrun); without it rank 0 starts the
others on its own machine. A rank that dies takes the trainer with it: a collective cannot go on
without one, and all there is to lose is a step that was not committed.
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
from dora_pipe.consumers.learners.deepspeed.meeting import Meeting, meeting_of
from dora_pipe.core.errors import ConfigError, ResourceError

COMMAND_TIMEOUT: Final = timedelta(days=7)
"""A rank waits so long for a command: batches may be slow, and a dead rank 0 is noticed at once."""

STEP_TIMEOUT: Final = timedelta(minutes=30)
"""One collective inside a step."""

LOST_GRACE_S: Final = 10.0
"""A rank has died and the others have not noticed by themselves for so long: the process ends."""

WATCH_S: Final = 0.2
STDERR: Final = 2
BUSY_S: Final = 1.0
"""A collective that takes longer is given up when the process ends."""

END_S: Final = 10.0
"""Ranks may take so long to end when they are told to."""

_ENVIRONMENT: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Who this process is among the ranks."""

    rank: int
    ranks: int
    local_rank: int
    rendezvous: str = ""
    """A file in which ranks of one machine find each other; empty: the environment says where."""


def environment_rank() -> RankInfo | None:
    """The rank that the environment gives to this process, if it does. Raises ConfigError."""
    values = [os.environ.get(name) for name in _ENVIRONMENT]
    if not all(values):
        return None
    try:
        rank, ranks = int(values[0] or ""), int(values[1] or "")
        local = int(os.environ.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE or LOCAL_RANK is no number: {error}") from None
    return RankInfo(rank=rank, ranks=ranks, local_rank=local)


class RankGroup:
    """A process's place among the ranks; there is one per process. See `rank_group`."""

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
        """How many there are."""
        return self.info.ranks

    def start_others(self) -> None:
        """Start the other ranks on this machine and watch over them."""
        for rank in range(1, self.ranks):
            command = [sys.executable, "-m", "dora_pipe.consumers.learners.deepspeed.follow"]
            device = self.device.partition(":")[0]
            words = [str(rank), str(self.ranks), self.info.rendezvous, device]
            self._children[rank] = subprocess.Popen(
                [*command, *words, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=STDERR,  # stdout is data
                start_new_session=True,  # a Ctrl-C is for rank 0, which ends its step first
            )
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def join(self) -> None:
        """Meet the others. Raises ResourceError if they do not come."""
        # DeepSpeed and torch read these wherever they like.
        os.environ["LOCAL_RANK"] = str(self.info.local_rank)
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)
        with self.together():
            self._init()
            if self.ranks > 1:
                self._control = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)

    def _init(self) -> None:
        info = self.info
        stores: Any = dist  # which exports them without saying so
        where: dict[str, Any] = {"init_method": "env://"}
        if info.ranks == 1:
            where = {"store": stores.HashStore()}
        elif info.rendezvous:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            where = {"store": stores.FileStore(info.rendezvous, info.ranks)}
        elif (met := meeting_of(info.rank, info.ranks)) is not None:
            self._meeting, where = met, {"store": met.store}
            met.watch(self._leave)
        dist.init_process_group(
            self.backend, rank=info.rank, world_size=info.ranks, timeout=STEP_TIMEOUT, **where
        )

    # What crosses

    def send(self, command: RankCommand) -> None:
        """From rank 0 to all others. Raises ResourceError when one is lost."""
        if self.ranks == 1:
            return
        data = bytearray(msgspec.msgpack.encode(command))
        with self.together():
            dist.broadcast(torch.tensor([len(data)]), 0, group=self._control)
            dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._control)

    def receive(self) -> RankCommand:
        """The next command of rank 0. Raises ResourceError when it is lost."""
        size = torch.zeros(1, dtype=torch.int64)
        with self.together():
            dist.broadcast(size, 0, group=self._control)
            data = torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._control)
        return COMMANDS.decode(data.numpy().tobytes())

    def reply(self, reply: msgspec.Struct) -> None:
        """To rank 0."""
        data = bytearray(msgspec.msgpack.encode(reply))
        with self.together():
            dist.send(torch.tensor([len(data)]), 0, group=self._control)
            dist.send(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._control)

    def replies(self) -> list[bytes]:
        """Of rank 1, 2, ...; every other rank has called `reply`. Raises ResourceError."""
        found: list[bytes] = []
        with self.together():
            for rank in range(1, self.ranks):
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, rank, group=self._control)
                data = torch.zeros(int(size), dtype=torch.uint8)
                dist.recv(data, rank, group=self._control)
                found.append(data.numpy().tobytes())
        return found

    def agree(self, good: bool) -> bool:
        """What rank 0 says; the others' argument does not matter."""
        word = torch.tensor([int(good)])
        if self.ranks > 1:
            with self.together():
                dist.broadcast(word, 0, group=self._control)
        return bool(word)

    def share(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place, on every rank; on the CPU."""
        if self.ranks > 1:
            with self.together():
                dist.broadcast(tensor, 0, group=self._control)
        return tensor

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around collectives, which fail when a rank is lost. Raises ResourceError."""
        try:
            with self._busy:
                yield
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"no memory is left on {self.device}: {error}",
                hint="a smaller trainer.micro_batch_tokens, or more trainer.ranks in a new run",
            ) from error
        except RuntimeError as error:
            self._settle()
            lost, broken = self._lost(), _of_wire(error)
            if not lost and not broken:
                raise
            raise ResourceError(lost or f"a rank of the trainer is gone: {broken}") from error

    # The other ranks as processes

    def end(self) -> None:
        """Tell the other ranks to end, and see to it for those started here; idempotent."""
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
        """In order, unless one is lost or they are in the middle of something."""
        idle = not self._lost() and self._busy.acquire(timeout=BUSY_S)
        if idle:
            with suppress(ResourceError):  # one that is gone need not be told
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
        """A collective of a GPU does not notice by itself that another rank is gone."""
        while not self._ended:
            if self._lost():
                self._leave()
            time.sleep(WATCH_S)

    def _leave(self) -> None:
        """One is lost: end, unless the rank notices by itself."""
        time.sleep(LOST_GRACE_S)
        if not self._ended:
            sys.stderr.write(f"error: {self._lost()}\n")
            sys.stderr.flush()
            self._forget_rendezvous()
            os._exit(ResourceError.exit_code)

    def _settle(self) -> None:
        """A connection is closed a little before its process has ended."""
        until_s = time.monotonic() + 1.0
        while self._children and not self._lost() and time.monotonic() < until_s:
            time.sleep(WATCH_S / 4)

    def _lost(self) -> str:
        """Which rank has ended, in words; empty while none has."""
        for rank, child in self._children.items():
            code = child.poll()
            if code is not None:
                how = f"ended with exit code {code}"
                if code < 0:
                    how = f"was killed ({signal.Signals(-code).name})"
                return f"rank {rank} of the trainer {how}"
        return self._meeting.lost if self._meeting else ""


def _of_wire(error: RuntimeError) -> str:
    """What broke between ranks, in a few words; empty if it was something else that failed."""
    text = str(error)
    for words in ("Connection closed by peer", "Connection reset by peer", "Timed out", "gloo"):
        if words in text:
            return words.lower()
    return text.partition("\n")[0] if isinstance(error, dist.DistError) else ""


_GROUP: list[RankGroup] = []


def rank_group(ranks: int, device: str) -> RankGroup:
    """The group of this process, made when it is first asked for; this process is rank 0.

    `device` is `cpu` or `cuda`. Raises ConfigError where the ranks cannot be as wanted,
    ResourceError when they do not come.
    """
    info = environment_rank()
    there = _GROUP[0].ranks if _GROUP else info.ranks if info else ranks
    if there != ranks:
        who = "this process has" if _GROUP else "the environment names"
        raise ConfigError(
            f"trainer.ranks is {ranks}, but {who} {there}",
            hint="the orchestrator, which wrote the run's configuration, must have the same number",
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
    """EndRanks the other ranks, if this process started any."""
    for group in _GROUP:
        group.end()


def _check_gpus(wanted: int) -> None:
    there = torch.cuda.device_count()
    if there < wanted:
        raise ConfigError(
            f"{wanted} ranks on this machine need a GPU each, and there are {there}",
            hint="-o trainer.device=cpu, or fewer trainer.ranks in a new run",
        )

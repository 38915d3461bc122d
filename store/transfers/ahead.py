"""The newest version on its way to this machine while its trainer still writes it; decides what is
pulled, and what becomes of it.

A thread asks the trainer's server what it is writing and pulls that, at the pace of the trainer's
disk or of the wire, into a folder beside the cache. What has come is hashed, and lies there under
the digest of its bytes until a worker wants weights of that digest, which is after their commit:
nothing is loaded earlier than without, only bytes travel earlier. One version at a time is pulled
on a machine and one lies there: the next one takes its place, and so goes what was never committed.

Like every transfer this is worth nothing but time. Whatever goes wrong is a line in the log.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from dora_pipe.core.errors import PolicyError, ResourceError
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.transfers.coming import Written
from dora_pipe.store.transfers.port import BROKEN_OFF, NO_ROOM, Lost, Sink

LOG = logging.getLogger(__name__)

ASK_S: Final = 0.25
"""The trainer is asked so often what it is writing."""

LOOK_S: Final = 10.0
"""Where no trainer answers, the log is read for its address at most this often."""

CLOSE_S: Final = 2.0

ROOM_SHARE: Final = 2
"""Nothing is pulled unless so many times its bytes are free: the cache needs room, too."""

WAIT_S: Final = 60.0
"""Who wants a version that is on its way waits for it as long as bytes come, and no longer than
this; then it is got as without."""

AHEAD: Final = "ahead"
"""The folder of it, beside those of the cache."""

PART: Final = "part"
LOCK: Final = "lock"


class Writer(Protocol):
    """What tells of a version that a peer writes, and gets it; see `FlightTransfers`."""

    def coming(self, peer: str) -> Written | Lost: ...

    def follow(self, peer: str, written: Written, target: Sink) -> Lost | None:
        """Write the bytes as they come; None when all of them did."""
        ...


class _Part:
    """A file that takes no more when it shall stop."""

    def __init__(self, file: Sink, stop: threading.Event) -> None:
        self._file, self._stop = file, stop

    def write(self, data: Any) -> int:
        if self._stop.is_set():
            raise InterruptedError
        return self._file.write(data)


class WeightsAhead:
    """Any thread may `take`. `trainer` says its address, empty where it is not known.

    Example: ``WeightsAhead(transfers, finder.trainer, root / AHEAD)``
    """

    def __init__(self, source: Writer, trainer: Callable[[], str], place: Path) -> None:
        self._source = source
        self._trainer = trainer
        self._place = place
        self._peer = ""
        self._seen = ""
        self._on_its_way: Written | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-ahead", daemon=True)

    def start(self) -> None:
        """Pull from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and leave nothing behind that nobody has taken; idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        with self._alone() as alone:
            if alone:
                self._clear()

    def take(self, name: str, target: Path) -> bool:
        """Move the weights of this name to `target`, if they came ahead; waits for them while they
        come. The bytes are compared by whoever takes them."""
        folder, _, leaf = name.partition("/")
        if folder != "weights":
            return False
        self._wait(leaf.partition(".")[0])
        try:
            (self._place / leaf).replace(target)
        except OSError:
            return False
        LOG.info("%s came while it was written", name[:20])
        return True

    def _wait(self, digest: str) -> None:
        """Until the version that is on its way is here, if it is this one."""
        written, until_s = self._on_its_way, time.monotonic() + WAIT_S
        if written is None:
            return
        asked = self._source.coming(self._peer)
        if isinstance(asked, Lost) or (asked.name, asked.digest) != (written.name, digest):
            return
        while self._on_its_way is written and time.monotonic() < until_s:
            time.sleep(ASK_S / 10)

    def _run(self) -> None:
        while not self._stop.wait(ASK_S if self._peer else 0):
            self._peer = self._peer or self._trainer()
            if not self._peer:
                self._stop.wait(LOOK_S)
                continue
            written = self._source.coming(self._peer)
            if isinstance(written, Lost):
                self._peer = ""  # it may be another process by now
                self._stop.wait(LOOK_S)
            elif written.name not in ("", self._seen):
                self._seen = written.name
                if not (self._place.parent / "weights" / written.name).exists():  # written here
                    self._pull(written)

    def _pull(self, written: Written) -> None:
        """Get a version, unless another process of this machine does."""
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            with self._alone() as alone:
                if not alone:
                    return
                self._clear()
                self._on_its_way = written
                lost = self._received(written)
        except OSError as error:
            lost = Lost(str(error.strerror or error))
        finally:
            self._on_its_way = None
        if lost is not None:
            LOG.info("a version did not come ahead from %s: %s", self._peer, lost.why)

    def _received(self, written: Written) -> Lost | None:
        part = self._place / PART
        if shutil.disk_usage(self._place).free < ROOM_SHARE * written.bytes:
            return Lost(NO_ROOM)
        try:
            with part.open("wb") as file:
                lost = self._source.follow(self._peer, written, _Part(file, self._stop))
            if lost is None:
                part.replace(self._place / f"{read_manifest(part).digest}.safetensors")
            return lost
        except (PolicyError, ResourceError):
            return Lost(BROKEN_OFF)
        finally:
            part.unlink(missing_ok=True)

    def _clear(self) -> None:
        for path in self._place.glob("*"):
            if path.name != LOCK:
                path.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether no other process of this machine pulls; the lock dies with its process."""
        try:
            file = (self._place / LOCK).open("wb")
        except OSError:
            yield False
            return
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True

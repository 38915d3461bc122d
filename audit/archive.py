"""Archives a run: reads its log from where the archive ends, checks it, seals it; decides the cut.

The cut is made so that an audit of the archive sees what an audit of the log would have seen at
some moment, although the run goes on: ends are taken in an order in which each covers what the
next one names (see `reading.Horizon`). Trajectories go as far as they went before the decisions
were looked at, or as far as the facts that those decisions fold name them; control as far as those
decisions fold it, or as it went before them.

`copy_policies` adds the files that commits name. They keep the names of what they hold, so a copy
that exists is never made again, and one that holds something else is refused.

`verify` looks at every byte, and names what is wrong. What it cannot see: an archive that was
rewritten as a whole, with digests and a chain that fit. `audit` of the archive can (the rounds have
a chain of their own, facts and commits name digests), and so can anybody who wrote down an earlier
head of the chain.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dora_pipe.audit.reading import ends_of, record_at, records_of
from dora_pipe.bus.archive.manifest import (
    CLAIMS,
    MANIFEST,
    SEGMENTS,
    Entry,
    Manifest,
    load_manifest,
    problems_of,
)
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.archive.segment import read_segment
from dora_pipe.bus.archive.tiered import check_same_log
from dora_pipe.bus.archive.writer import SEGMENT_BYTES, ArchiveWriter
from dora_pipe.bus.checks import check_not_truncated
from dora_pipe.bus.claim_check import CLAIM, ClaimBus, ClaimFiles, claimed_bytes
from dora_pipe.bus.port import Bus, Record, TopicPartition
from dora_pipe.consumers.trainer.commits import made_again
from dora_pipe.core.errors import BusError, InvariantBroken, LogTruncated, PolicyError, SchemaError
from dora_pipe.schemas.control import (
    Retrained,
    RunStarted,
    StepCommitted,
    TrajectoriesLogged,
    VersionsDropped,
    decode_control,
)
from dora_pipe.schemas.policy import Manifest as PolicyManifest
from dora_pipe.schemas.rounds import decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import DIGEST, digest_as
from dora_pipe.store.names import BlobKind, file_sha256
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore

_STOP: Final = b'"kind":"stop-run"'
_LOGGED: Final = b'"trajectories-logged"'


@dataclass(slots=True, kw_only=True)
class Pass:
    """What one pass added."""

    segments: int = 0
    records: int = 0
    bytes: int = 0
    """Of keys, headers and values."""
    head: str = ""
    """The chain's last value afterwards."""
    notes: list[str] = field(default_factory=list)
    """What is not as it should be and was archived as it is, one line each."""


class Archiver:
    """Lets the archive of one run grow, pass by pass. Example: ``Archiver(bus, topics, dir)``"""

    def __init__(
        self, bus: Bus, topics: Topics, directory: Path, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Raises UsageError, BusError, InvariantBroken when the archive is not of this log."""
        self._bus = bus.inner if isinstance(bus, ClaimBus) else bus
        self._claims = bus.store if isinstance(bus, ClaimBus) else None
        self._kept = ClaimFiles(directory / CLAIMS)
        self._topics = topics
        counts = {topic: self._bus.partitions(topic) for topic in topics.all()}
        self._writer = ArchiveWriter(directory, topics.run, counts, segment_bytes=segment_bytes)
        with ExitStack() as closing_it:
            closing_it.callback(self._writer.close)
            with closing(ArchiveBus(directory)) as archive:
                check_same_log(archive, self._bus)
                self._stopped = self.finished = self._is_finished(archive)
                """The run's last decision is in the archive; finished: nothing is held back."""
            closing_it.pop_all()
        self._pass = Pass()

    def _is_finished(self, archive: ArchiveBus) -> bool:
        """From what earlier passes archived."""
        decisions = TopicPartition(self._topics.decisions, 0)
        rounds = records_of(archive, {decisions: archive.end(decisions)})
        return any(_STOP in record.value for record in rounds)

    def once(self) -> Pass:
        """Archive everything up to a cut that lies not before what is there now.

        Raises LogTruncated when the log has lost what was not archived yet, BusError, BusFull,
        ResourceError; what was sealed until then stays.
        """
        self._pass = Pass()
        sealed = len(self._writer.manifest.entries)
        topics, bus = self._topics, self._bus
        control, decisions = TopicPartition(topics.control, 0), TopicPartition(topics.decisions, 0)
        before = ends_of(bus, topics.trajectories)
        control_before = bus.end(control)
        rounds, facts = _Rounds(), _Facts()
        self._seal(decisions, bus.end(decisions), rounds.look)
        folded = min(rounds.control_next, bus.end(control))
        self._seal(control, max(control_before, folded), facts.look)
        for tp, end in ends_of(bus, topics.trajectories).items():
            self._seal(tp, max(before[tp], min(facts.named.get(tp.partition, 0), end)))
        for topic in (topics.progress, topics.metrics, topics.dead_letters):
            for tp, end in ends_of(bus, topic).items():
                self._seal(tp, end)
        self._writer.cut()
        self._stopped = self._stopped or rounds.stopped
        self.finished = self._stopped and not self._is_held_back()
        self._pass.segments = len(self._writer.manifest.entries) - sealed
        self._pass.head = self._writer.head
        return self._pass

    def _is_held_back(self) -> bool:
        """Whether the log has acknowledged records that nobody can read yet; noted."""
        held = [
            tp
            for topic in self._topics.all()
            for tp, end in ends_of(self._bus, topic).items()
            if end < self._bus.written_end(tp)
        ]
        self._pass.notes += [
            f"{tp.topic}/{tp.partition}: its last records cannot be read yet, because an append "
            "before them is open; archive once more"
            for tp in held
        ]
        return bool(held)

    def _seal(
        self, tp: TopicPartition, end: int, look: Callable[[Record], None] = lambda record: None
    ) -> None:
        """Seal what the archive does not have yet, up to `end`; `look` is shown every record."""
        start = self._start(tp)
        end = max(start, end)
        found = records_of(self._bus, {tp: end}, start=start) if end > start else ()
        self._writer.seal(tp, self._counted(found, look), end, self._is_odd)

    def _start(self, tp: TopicPartition) -> int:
        """Where the archive goes on; what was deleted before it got there is noted."""
        start, begin = self._writer.position(tp), self._bus.begin(tp)
        check_not_truncated(tp, start, self._bus.end(tp))
        if start >= begin:
            return start
        if tp.topic not in (self._topics.metrics, self._topics.progress):
            raise LogTruncated(
                f"{tp.topic}/{tp.partition} begins at {begin}: the records from offset {start} "
                "on were deleted before they were archived",
                hint="go on with another archive that holds them, if there is one; what this "
                f"one holds stays readable: dora-pipe audit {self._writer.directory}",
            )
        self._pass.notes.append(
            f"{tp.topic}/{tp.partition}: offsets {start} to {begin - 1} were deleted before "
            "they were archived"
        )
        self._writer.skip(tp, begin)
        return begin

    def _counted(
        self, records: Iterable[Record], look: Callable[[Record], None]
    ) -> Iterator[Record]:
        for record in records:
            self._pass.records += 1
            self._pass.bytes += len(record.key) + len(record.value)
            look(record)
            yield record

    def _is_odd(self, record: Record) -> bool:
        """Whether the log itself holds other bytes than a record's headers name.

        Raises BusError if only this reading of it did.
        """
        headers = dict(record.headers)
        where = f"{record.topic}/{record.partition}@{record.offset}"
        if lost := self._keep_claim(record):
            self._pass.notes.append(f"{where}: {lost}")
            return True
        named = headers.get("sha256", b"").decode(errors="replace")
        if not DIGEST.fullmatch(named) or claimed_bytes(record):
            return False
        if digest_as(named, record.value) == named:
            return False
        if record_at(self._bus, record.at, record.offset) != record:
            raise BusError(f"{where}: two readings gave different bytes; nothing was sealed")
        self._pass.notes.append(f"{where}: its bytes are not those that its headers name (sha256)")
        return True

    def _keep_claim(self, record: Record) -> str:
        """Copy the value that a record claims; why that cannot be, empty if nothing is wrong."""
        size_bytes = claimed_bytes(record)
        if not size_bytes:
            return ""
        digest = dict(record.headers)[CLAIM].decode()
        value = None if self._claims is None else self._claims.read(digest, size_bytes)
        if value is None or digest_as(digest, value) != digest:
            return f"the value that it claims is not there: {digest}"
        self._kept.write(digest, value)
        return ""

    def close(self) -> None:
        """Let another process write the archive; idempotent."""
        self._writer.close()


@dataclass(slots=True)
class _Rounds:
    """Sees decisions on their way into the archive."""

    last: bytes = b""
    stopped: bool = False

    def look(self, record: Record) -> None:
        self.last = record.value
        self.stopped = self.stopped or _STOP in record.value

    @property
    def control_next(self) -> int:
        """How far the last one folds control; 0 if there was none, or it cannot be read."""
        with suppress(SchemaError):
            return decode_round(self.last).control_next if self.last else 0
        return 0


@dataclass(slots=True)
class _Facts:
    """Sees control on its way into the archive."""

    named: dict[int, int] = field(default_factory=dict)
    """Position behind the last trajectory that it names, by partition."""

    def look(self, record: Record) -> None:
        if _LOGGED not in record.value:
            return
        with suppress(SchemaError):
            fact = decode_control(record.value)
            if isinstance(fact, TrajectoriesLogged):
                for one in fact.facts():
                    named = max(self.named.get(one.partition, 0), one.offset + 1)
                    self.named[one.partition] = named


POLICIES: Final = "policies"
"""Folder of the archive with the copies; laid out as a run's policy store."""

_KINDS: Final = (b'"run-started"', b'"step-committed"', b'"versions-dropped"')


@dataclass(slots=True, kw_only=True)
class Copied:
    """What was copied."""

    files: int = 0
    bytes: int = 0
    absent: list[str] = field(default_factory=list)
    """What the store does not have (any more), one line each."""


def copy_policies(directory: Path, topics: Topics, source: PolicyStore) -> Copied:
    """Copy every file that the archived commits name and the archive lacks.

    Raises PolicyError for a file that is not what its name says, ResourceError without room.
    """
    copied = _Copier(source, PolicyStore(directory / POLICIES))
    with closing(ArchiveBus(directory)) as bus:
        for fact in _facts(bus, TopicPartition(topics.control, 0)):
            match fact:
                case RunStarted():
                    copied.started(fact)
                case StepCommitted():
                    copied.step(fact)
                    copied.dropped |= set(fact.dropped)
                case VersionsDropped():
                    copied.dropped |= set(fact.versions)
    return copied.finished(topics.run)


def _facts(
    bus: ArchiveBus, control: TopicPartition
) -> Iterator[RunStarted | StepCommitted | VersionsDropped]:
    """The records that name files, or say which are not needed any more."""
    for record in records_of(bus, {control: bus.end(control)}):
        if not any(kind in record.value for kind in _KINDS):
            continue
        with suppress(SchemaError):
            fact = decode_control(record.value)
            if isinstance(fact, RunStarted | StepCommitted | VersionsDropped):
                yield fact


class _Copier:
    def __init__(self, source: PolicyStore, target: PolicyStore) -> None:
        self._source = source
        self._target = target
        self._lost: list[tuple[int, str]] = []  # what is not there, of which version; 0 stays
        self.dropped: set[int] = set()
        self.done = Copied()

    def finished(self, run: str) -> Copied:
        """What was copied; what was dropped is one line."""
        self.done.absent += [who for version, who in self._lost if version not in self.dropped]
        if gone := {version for version, _ in self._lost} & self.dropped:
            self.done.absent.append(f"what was dropped: {made_again(run, gone)}")
        return self.done

    def started(self, fact: RunStarted) -> None:
        self.weights("version 0", fact.policy.digest)
        self.assets(fact.assets_digest)
        if fact.optimizer is not None:
            who = "the optimizer's state that version 0 begins with"
            self._blob(who, "optimizer", fact.optimizer.sha256)
        if fact.retrained is not None:
            self._retrained(fact.retrained)

    def _retrained(self, made: Retrained) -> None:
        """What steps of another run that were trained again begin with, and what changed them."""
        self.weights(f"version {made.first}", made.policy.digest)
        for version, digest in made.references.items():
            self.weights(f"version {version}, a reference", digest)
        if made.optimizer is not None:
            who = f"the optimizer's state before step {made.first}"
            self._blob(who, "optimizer", made.optimizer.sha256)
        if made.change is not None:
            self._blob("what is otherwise in its rows", "change", made.change.sha256)
        self._lost.append((0, f"its trajectories, which the log of `{made.run}` has"))

    def step(self, fact: StepCommitted) -> None:
        """What a commit names."""
        who = f"step {fact.step}"
        number = fact.step + 1
        version = f"version {number}"
        if fact.patch is not None:
            self._patch(version, fact.digest_after, fact.patch.sha256)
        if fact.whole or not self._target.has_patch(fact.digest_after):
            self.weights(version, fact.policy.digest, number)
        self._blob(f"contributions of {who}", "contributions", fact.contributions.sha256)
        if fact.checkpoint is not None:
            self._blob(f"checkpoint of {who}", "optimizer", fact.checkpoint.sha256, number)

    def weights(self, who: str, digest: str, version: int = 0) -> None:
        """Weights, tensor by tensor what their name says."""
        if self._target.has_whole(digest):
            return
        if not self._source.has_whole(digest):
            self._lost.append((version, f"weights of {who}"))
            return
        path = self._source.whole(digest)

        def write(final: Path) -> PolicyManifest:
            shutil.copyfile(path, final)
            found = read_manifest(final)
            if found.digest != digest:
                raise PolicyError(f"{path} holds other weights ({found.digest[:12]}...)")
            return found

        self._target.publish_weights(write)
        self._count(path)

    def _patch(self, who: str, digest: str, sha256: str) -> None:
        """The patch that makes a version, where it is still there."""
        if self._target.has_patch(digest) or not self._source.has_patch(digest):
            return
        path = self._source.patch(digest)
        if file_sha256(path) != sha256:
            raise PolicyError(f"{path}, the patch of {who}, was changed: its sha256 is another one")
        self._target.publish_patch(digest, path)
        self._count(path)

    def _blob(self, who: str, kind: BlobKind, sha256: str, version: int = 0) -> None:
        if self._target.has_blob(kind, sha256):
            return
        if not self._source.has_blob(kind, sha256):
            self._lost.append((version, who))
            return
        path = self._source.verify_blob(kind, sha256)

        def write(final: Path) -> None:
            shutil.copyfile(path, final)

        self._target.publish_blob(kind, write)
        self._count(path)

    def assets(self, digest: str) -> None:
        """Configuration and tokenizer files."""
        if self._target.assets_path(digest).is_dir():
            return
        files = sorted(self._source.assets(digest).iterdir())
        if self._target.publish_assets(files) != digest:
            raise PolicyError("configuration and tokenizer files were changed in the store")
        for path in files:
            self._count(path)

    def _count(self, path: Path) -> None:
        self.done.files += 1
        self.done.bytes += path.stat().st_size


PROBLEMS_MAX: Final = 1000
"""Lines of an archive in which nothing is right."""


@dataclass(slots=True, kw_only=True)
class Verified:
    """What was looked at, and what is wrong."""

    run: str = ""
    segments: int = 0
    records: int = 0
    bytes: int = 0
    """Of files."""
    claims: int = 0
    head: str = ""
    cut: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Positions per topic and partition: everything before them is in the archive."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is as it was archived, and strange."""

    def add(self, problem: str) -> None:
        """One more thing that is wrong."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)


def verify(directory: Path, *, expected: str = "") -> Verified:
    """Look at the manifest, its chain, every segment and every claimed value.

    `expected` is a head of the chain that somebody wrote down: it must stand in the chain still.
    Raises SchemaError, LogTruncated when the manifest itself cannot be read.
    """
    manifest = load_manifest(directory)
    found = Verified(run=manifest.run, head=manifest.head, cut=dict(manifest.cut))
    for problem in problems_of(manifest):
        found.add(f"{MANIFEST}: {problem}")
    if expected and expected not in {manifest.head, *(one.chain for one in manifest.entries)}:
        found.add(f"{MANIFEST}: its chain never had the value {expected}: the archive is another")
    for entry in manifest.entries:
        _look(directory, entry, found)
    _strangers(directory, manifest, found)
    return found


def raise_if_damaged(found: Verified) -> None:
    """Raise InvariantBroken, naming the first problem, unless there is none."""
    if found.problems:
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        raise InvariantBroken(f"{found.problems[0]}{more}", hint="restore it from a copy")


def _look(directory: Path, entry: Entry, found: Verified) -> None:
    where = f"{entry.topic}/{entry.partition}"
    if entry.deleted:
        last = entry.start + entry.deleted - 1
        found.notes.append(f"{where}: {entry.start} to {last} were deleted before they were sealed")
    for offset in entry.odd:
        found.notes.append(f"{where}@{offset}: its bytes are not those that its headers name")
    if not entry.records:
        return
    try:
        segment = read_segment(directory / SEGMENTS / entry.file, entry)
    except (InvariantBroken, LogTruncated) as error:
        found.add(error.message)
        return
    found.segments += 1
    found.records += entry.records
    found.bytes += entry.file_bytes
    for record in segment.claiming():
        _look_at_claim(directory, record, entry, found)


def _look_at_claim(directory: Path, record: Record, entry: Entry, found: Verified) -> None:
    size_bytes = claimed_bytes(record)
    if not size_bytes or record.offset in entry.odd:
        return
    digest = dict(record.headers)[CLAIM].decode()
    path = directory / CLAIMS / digest
    where = f"{record.topic}/{record.partition}@{record.offset}"
    if not path.is_file():
        found.add(f"{where}: the value that it claims is gone: {CLAIMS}/{digest}")
    elif digest_as(digest, path.read_bytes()) != digest:
        found.add(f"{where}: the value that it claims was changed: {CLAIMS}/{digest}")
    else:
        found.claims += 1


def _strangers(directory: Path, manifest: Manifest, found: Verified) -> None:
    named = {entry.file for entry in manifest.entries}
    folder = directory / SEGMENTS
    others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in others:
        if name not in named:
            found.notes.append(f"{SEGMENTS}/{name} is not in the manifest: a pass was interrupted")

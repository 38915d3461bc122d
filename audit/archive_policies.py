"""Copies into an archive the files that its commits name; decides nothing about their names.

Policies, optimizer states, contributions, configuration and tokenizer files keep the names of what
they hold, so a copy that exists is never made again, and one that holds something else is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dora_pipe.audit.reading import records_of
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.port import TopicPartition
from dora_pipe.core.errors import PolicyError, SchemaError
from dora_pipe.schemas.control import RunStarted, StepCommitted, decode_control
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import BlobKind, PolicyStore

POLICIES: Final = "policies"
"""Folder of the archive with the copies; laid out as a run's policy store."""

_KINDS: Final = (b'"run-started"', b'"step-committed"')


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
            if isinstance(fact, RunStarted):
                copied.weights("version 0", fact.policy.digest)
                copied.assets(fact.assets_digest)
            else:
                copied.step(fact)
    return copied.done


def _facts(bus: ArchiveBus, control: TopicPartition) -> Iterator[RunStarted | StepCommitted]:
    """The records that name files."""
    for record in records_of(bus, {control: bus.end(control)}):
        if not any(kind in record.value for kind in _KINDS):
            continue
        with suppress(SchemaError):
            fact = decode_control(record.value)
            if isinstance(fact, RunStarted | StepCommitted):
                yield fact


class _Copier:
    def __init__(self, source: PolicyStore, target: PolicyStore) -> None:
        self._source = source
        self._target = target
        self.done = Copied()

    def step(self, fact: StepCommitted) -> None:
        """What a commit names."""
        who = f"step {fact.step}"
        self.weights(f"version {fact.step + 1}", fact.policy.digest)
        self._blob(f"contributions of {who}", "contributions", fact.contributions.sha256)
        if fact.checkpoint is not None:
            self._blob(f"checkpoint of {who}", "optimizer", fact.checkpoint.sha256)

    def weights(self, who: str, digest: str) -> None:
        """Weights, tensor by tensor what their name says."""
        if self._target.has_weights(digest):
            return
        if not self._source.has_weights(digest):
            self.done.absent.append(f"weights of {who}")
            return
        path = self._source.weights(digest)

        def write(final: Path) -> Manifest:
            shutil.copyfile(path, final)
            found = read_manifest(final)
            if found.digest != digest:
                raise PolicyError(f"{path} holds other weights ({found.digest[:12]}...)")
            return found

        self._target.publish_weights(write)
        self._count(path)

    def _blob(self, who: str, kind: BlobKind, sha256: str) -> None:
        if self._target.has_blob(kind, sha256):
            return
        if not self._source.has_blob(kind, sha256):
            self.done.absent.append(who)
            return
        path = self._source.verify_blob(kind, sha256)
        self._target.publish_blob(kind, lambda final: _copy(path, final))
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


def _copy(source: Path, final: Path) -> None:
    shutil.copyfile(source, final)

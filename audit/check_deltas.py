"""Check the deltas of the policy store against their commits.

Versions are rebuilt in a temporary folder, without the store's copies.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Self

from dora_pipe.audit.findings import Findings
from dora_pipe.consumers.trainer.commits import DELTA_SHARE
from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.delta import opened_delta
from dora_pipe.store.names import file_sha256
from dora_pipe.store.store import PolicyStore


class DeltaCheck:
    """Check of deltas in version order; `absent` receives those that may have been dropped."""

    def __init__(
        self, store: PolicyStore, findings: Findings, absent: dict[tuple[str, int], str]
    ) -> None:
        self._store = store
        self._findings = findings
        self._absent = absent
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._last: tuple[str, Path] | None = None
        self._unproven = -1
        """Newest version that failed to rebuild."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def look(self, fact: StepCommitted) -> None:
        """Check that the committed delta builds its version from the previous one."""
        version = fact.step + 1
        who = f"delta of version {version}"
        if fact.delta is None:
            if not fact.full:
                self._findings.add("policies", who, "its version is there neither whole nor so")
            return
        self._findings.looked["policies"] += 1
        if not self._is_named(who, fact):
            self._unproven = -1 if fact.full else version
            return
        if fact.full and self._unproven == fact.step:
            return  # already reported; this version is a full checkpoint
        try:
            made = self._made(fact.digest_before, fact.digest_after)
        except PolicyError as error:
            # Next to a full checkpoint a delta is useless without its previous version.
            self._absent[who, fact.step if fact.full else version] = error.message
            self._unproven = -1 if fact.full else version
            return
        message = "what it makes is not what its commit says"
        expected = (fact.policy.bytes, set(fact.policy.tensors))
        found = (made.bytes, set(made.tensors))
        self._findings.same("policies", who, message, expected=expected, found=found)
        share = fact.delta.bytes / max(1, made.bytes)
        message = f"the figure {DELTA_SHARE} of its commit is not that of its bytes"
        told = fact.metrics.get(DELTA_SHARE)
        self._findings.same("policies", who, message, expected=share, found=told)

    def _is_named(self, who: str, fact: StepCommitted) -> bool:
        assert fact.delta is not None
        try:
            path = self._store.delta(fact.digest_after)
            found = (path.stat().st_size, file_sha256(path))
        except FileNotFoundError:
            self._absent[who, fact.step + 1] = f"no delta at {path}"
            return False
        except PolicyError as error:
            self._absent[who, fact.step + 1] = error.message
            return False
        expected = (fact.delta.bytes, fact.delta.sha256)
        message = "is another file than the commit names (bytes, sha256)"
        return self._findings.same("policies", who, message, expected=expected, found=found)

    def _made(self, before: str, after: str) -> Manifest:
        """Apply the delta to the previous version. Raises PolicyError, ResourceError."""
        with opened_delta(self._store.delta(after)) as delta:
            if (delta.before, delta.after) != (before, after):
                raise PolicyError(f"{delta.where} is between other versions than its commit")
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="dora-pipe-audit-")
        path = Path(self._folder.name) / f"{after}.safetensors"
        last = self._last

        def here(digest: str) -> Path | None:
            return last[1] if last is not None and last[0] == digest else None

        manifest = self._store.make(after, path, here)
        if last is not None and last[1] != path:
            last[1].unlink()
        self._last = (after, path)
        return manifest

"""Check the policy store against the commits."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from dora_pipe.audit.entries import StepEntry, VersionEntry
from dora_pipe.audit.findings import Findings
from dora_pipe.audit.ledger import Ledger
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.consumers.learners.settings import advantage_rule
from dora_pipe.consumers.objectives.advantage import batch_advantages
from dora_pipe.consumers.trainer.commits import DELTA_SHARE
from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.store.delta import opened_delta
from dora_pipe.store.names import assets_digest, file_sha256
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore

_TOLERANCE = 1e-9
"""Relative tolerance for recomputed advantages."""


class PolicyCheck:
    """Check of named files; a missing file is reported in `finish` unless a commit dropped it."""

    _store: PolicyStore

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._findings = ledger.findings
        self.absent: dict[tuple[str, int], str] = {}
        """Messages by (file, version)."""
        self.storeless = False

    def look(
        self, store: PolicyStore, versions: Iterable[VersionEntry], steps: Iterable[StepEntry]
    ) -> None:
        """Check every file that these versions and steps name."""
        self._store = store
        steps = list(steps)
        facts = {entry.step + 1: entry.fact for entry in steps}
        for version in versions:
            there = store.root.is_dir() or store.has_weights(version.digest)
            if not there and not self.storeless:
                self._findings.add("policies", store.where, "there is no policy store")
            self.storeless = self.storeless or not there
            if self.storeless:
                return
            fact = facts.get(version.version)
            if fact is None or fact.full:
                self._weights(version.version, version.manifest)
            if version.version == 0 and self._ledger.started is not None:
                self._assets(self._ledger.started.assets_digest)
                who = "the optimizer's state that version 0 begins with"
                self._optimizer(who, 0, self._ledger.started.optimizer)
        if self.storeless:
            return
        with DeltaCheck(store, self._findings, self.absent) as deltas:
            for entry in steps:
                deltas.look(entry.fact)
        for entry in steps:
            self._contributions(entry)
            who = f"checkpoint of step {entry.step}"
            self._optimizer(who, entry.step + 1, entry.fact.checkpoint)
        self._excuse()

    def finish(self) -> None:
        """Report missing files that no commit dropped."""
        self._excuse()
        for (who, _), message in self.absent.items():
            self._findings.add("policies", who, message)

    def _excuse(self) -> None:
        dropped = self._ledger.dropped
        for who, version in [key for key in self.absent if key[1] in dropped]:
            del self.absent[who, version]

    def _weights(self, version: int, manifest: Manifest) -> None:
        who = f"version {version}"
        self._findings.looked["policies"] += 1
        try:
            path = self._store.whole(manifest.digest)
            stored = read_manifest(path)
        except PolicyError as error:
            if self._store.has_whole(manifest.digest):
                self._findings.add("policies", who, error.message)
            else:
                self.absent[who, version] = error.message
            return
        if stored.digest != manifest.digest:
            self._findings.add(
                "policies", who, f"{path} holds other weights ({stored.digest[:12]}...)"
            )
            return
        self._same_tensors(who, manifest, stored)

    def _same_tensors(self, who: str, manifest: Manifest, stored: Manifest) -> None:
        message = "the tensors of its file are not those of its manifest"
        expected, there = set(manifest.tensors), set(stored.tensors)
        self._findings.same("policies", who, message, expected=expected, actual=there)
        message = "its file has another size than its manifest"
        self._findings.same("policies", who, message, expected=manifest.bytes, actual=stored.bytes)

    def _assets(self, digest: str) -> None:
        try:
            folder = self._store.assets(digest)
        except PolicyError as error:
            self._findings.add("policies", "assets", error.message)
            return
        there = assets_digest(sorted(folder.iterdir())) if folder.is_dir() else "nothing"
        message = "configuration and tokenizer files were changed"
        self._findings.same("policies", "assets", message, expected=digest, actual=there)

    def _optimizer(self, who: str, version: int, blob: Blob | None) -> None:
        if blob is None:
            return
        self._findings.looked["policies"] += 1
        try:
            self._sized(who, self._store.verify_blob("optimizer", blob.sha256), blob)
        except PolicyError as error:
            if self._store.has_blob("optimizer", blob.sha256):
                self._findings.add("policies", who, error.message)
            else:
                self.absent[who, version] = error.message

    def _sized(self, who: str, path: Path, blob: Blob) -> None:
        message = "its file has another size than its commit"
        actual = path.stat().st_size
        self._findings.same("policies", who, message, expected=blob.bytes, actual=actual)

    def _contributions(self, entry: StepEntry) -> None:
        who = f"contributions of step {entry.step}"
        self._findings.looked["policies"] += 1
        try:
            path = self._store.verify_blob("contributions", entry.fact.contributions.sha256)
        except PolicyError as error:
            self._findings.add("policies", who, error.message)
            return
        self._sized(who, path, entry.fact.contributions)
        try:
            rows = read_contributions(path)
        except (pa.ArrowException, OSError, ValueError) as error:
            self._findings.add("policies", who, f"cannot be read: {error}")
            return
        expected = self.rows_of(entry)
        actual = [row["trajectory"] for row in rows]
        message = "its rows are not the trajectories of the batch"
        if self._findings.same("policies", who, message, expected=expected, actual=actual):
            self._rows(entry, {row["trajectory"]: row for row in rows})

    def rows_of(self, entry: StepEntry) -> list[str]:
        """Return the trajectories in row order of the contributions file: dispatch order, which
        differs from deadline order after `set`."""
        return sorted(
            trajectory.trajectory
            for group in entry.fact.groups
            for trajectory in group.trajectories
        )

    def _rows(self, entry: StepEntry, rows: dict[str, dict[str, Any]]) -> None:
        ledger_groups = self._ledger.accounts.groups
        groups = [
            ledger_groups[taken.group]
            for taken in entry.fact.groups
            if taken.group in ledger_groups
        ]
        rewards = [
            (group.spec.version, [fact.reward for fact in group.results]) for group in groups
        ]
        rule, by_std = advantage_rule(entry.fact.settings)
        comparable = len(groups) == len(entry.fact.groups) or rule != "version-baseline"
        advantages = batch_advantages(rewards, rule, by_std)
        for group, of_group in zip(groups, advantages, strict=True):
            for fact, advantage in zip(group.results, of_group, strict=True):
                if (row := rows.get(fact.trajectory)) is None:
                    continue
                expected = {
                    "group": group.spec.group,
                    "version": group.spec.version,
                    "staleness": staleness_of(entry.step, group.spec.version),
                    "reward": fact.reward,
                    "tokens": fact.tokens,
                }
                for name, value in expected.items():
                    self._row(entry.step, fact.trajectory, name, value, row[name])
                if comparable and not close_to(advantage, row["advantage"]):
                    self._row(entry.step, fact.trajectory, "advantage", advantage, row["advantage"])

    def _row(self, step: int, trajectory: str, name: str, expected: object, actual: object) -> None:
        message = f"{name} in the contributions of step {step} does not follow from what was logged"
        self._findings.same("policies", trajectory, message, expected=expected, actual=actual)


def close_to(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


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
                self._findings.add(
                    "policies", who, "its version has neither a full checkpoint nor a delta"
                )
            return
        self._findings.looked["policies"] += 1
        if not self._is_named(who, fact):
            self._unproven = -1 if fact.full else version
            return
        if fact.full and self._unproven == fact.step:
            return  # already reported; this version is a full checkpoint
        try:
            manifest = self._made(fact.digest_before, fact.digest_after)
        except PolicyError as error:
            # Next to a full checkpoint a delta is useless without its previous version.
            self._absent[who, fact.step if fact.full else version] = error.message
            self._unproven = -1 if fact.full else version
            return
        message = "the weights it builds are not those of its commit"
        expected = (fact.policy.bytes, set(fact.policy.tensors))
        actual = (manifest.bytes, set(manifest.tensors))
        self._findings.same("policies", who, message, expected=expected, actual=actual)
        share = fact.delta.bytes / max(1, manifest.bytes)
        message = f"metric {DELTA_SHARE} of its commit differs from that of its bytes"
        recorded = fact.metrics.get(DELTA_SHARE)
        self._findings.same("policies", who, message, expected=share, actual=recorded)

    def _is_named(self, who: str, fact: StepCommitted) -> bool:
        assert fact.delta is not None
        try:
            path = self._store.delta(fact.digest_after)
            actual = (path.stat().st_size, file_sha256(path))
        except FileNotFoundError:
            self._absent[who, fact.step + 1] = f"no delta at {path}"
            return False
        except PolicyError as error:
            self._absent[who, fact.step + 1] = error.message
            return False
        expected = (fact.delta.bytes, fact.delta.sha256)
        message = "is another file than the commit names (bytes, sha256)"
        return self._findings.same("policies", who, message, expected=expected, actual=actual)

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

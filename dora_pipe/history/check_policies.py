"""Holds the policy store against the commits: weights, contributions, checkpoints, assets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa

from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.consumers.objectives.advantage import group_advantages
from dora_pipe.errors import PolicyError
from dora_pipe.history.entries import StepEntry
from dora_pipe.history.ledger import Ledger
from dora_pipe.policies.store import PolicyStore, assets_digest
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.policy import Blob, Manifest

_TOLERANCE = 1e-9
"""Relative; advantages are computed from the same numbers by the same sums."""


def check_policies(ledger: Ledger, root: Path) -> None:
    """Every file that the log names is there and is what the log says."""
    if not root.is_dir():
        ledger.findings.add("policies", str(root), "there is no policy store")
        return
    look = _Look(ledger, PolicyStore(root))
    for version in ledger.versions.values():
        look.weights(f"version {version.version}", version.manifest)
    if ledger.started is not None:
        look.assets(ledger.started.assets_digest)
    for entry in ledger.steps:
        look.contributions(entry)
        if entry.fact.checkpoint is not None:
            look.blob(f"checkpoint of step {entry.step}", "optimizer", entry.fact.checkpoint)


class _Look:
    def __init__(self, ledger: Ledger, store: PolicyStore) -> None:
        self._ledger = ledger
        self._findings = ledger.findings
        self._store = store

    def weights(self, who: str, manifest: Manifest) -> None:
        """The weights of a version, tensor by tensor."""
        self._findings.looked["policies"] += 1
        try:
            found = self._store.verify(manifest.digest)
        except PolicyError as error:
            self._findings.add("policies", who, error.message)
            return
        message = "the tensors of its file are not those of its manifest"
        expected, there = set(manifest.tensors), set(found.tensors)
        self._findings.same("policies", who, message, expected=expected, found=there)

    def assets(self, digest: str) -> None:
        """The files of configuration and tokenizer."""
        folder = self._store.assets_path(digest)
        there = assets_digest(sorted(folder.iterdir())) if folder.is_dir() else "nothing"
        message = "configuration and tokenizer files were changed"
        self._findings.same("policies", "assets", message, expected=digest, found=there)

    def blob(self, who: str, kind: Any, blob: Blob) -> Path | None:
        """A file named by its sha256; None when it is not what it should be."""
        self._findings.looked["policies"] += 1
        try:
            return self._store.verify_blob(kind, blob.sha256)
        except PolicyError as error:
            self._findings.add("policies", who, error.message)
            return None

    def contributions(self, entry: StepEntry) -> None:
        """The contributions of a step have one row per trajectory of its batch, and agree."""
        who = f"contributions of step {entry.step}"
        path = self.blob(who, "contributions", entry.fact.contributions)
        if path is None:
            return
        try:
            rows = read_contributions(path)
        except (pa.ArrowException, OSError, ValueError) as error:
            self._findings.add("policies", who, f"cannot be read: {error}")
            return
        # A trainer takes a batch in dispatch order; deadlines may have another one (`set`).
        wanted = sorted(one.trajectory for group in entry.fact.groups for one in group.trajectories)
        found = [row["trajectory"] for row in rows]
        message = "its rows are not the trajectories of the batch"
        if self._findings.same("policies", who, message, expected=wanted, found=found):
            self._rows(entry, {row["trajectory"]: row for row in rows})

    def _rows(self, entry: StepEntry, rows: dict[str, dict[str, Any]]) -> None:
        by_std = bool(entry.fact.settings.get("objective.advantage_std", True))
        for taken in entry.fact.groups:
            group = self._ledger.accounts.groups.get(taken.group)
            if group is None:
                continue
            facts = [logged.fact for logged in group.results]
            rewards = [fact.reward for fact in facts]
            advantages = group_advantages(rewards, divide_by_std=by_std)
            for fact, advantage in zip(facts, advantages, strict=True):
                if (row := rows.get(fact.trajectory)) is None:
                    continue
                expected = {
                    "group": taken.group,
                    "version": group.spec.version,
                    "staleness": staleness_of(entry.step, group.spec.version),
                    "reward": fact.reward,
                    "tokens": fact.tokens,
                }
                for name, value in expected.items():
                    self._row(entry.step, fact.trajectory, name, value, row[name])
                if not _close(advantage, row["advantage"]):
                    self._row(entry.step, fact.trajectory, "advantage", advantage, row["advantage"])

    def _row(self, step: int, trajectory: str, name: str, expected: object, found: object) -> None:
        message = f"{name} in the contributions of step {step} does not follow from what was logged"
        self._findings.same("policies", trajectory, message, expected=expected, found=found)


def _close(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)

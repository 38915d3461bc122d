"""Violations found in a log, collected instead of raised."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal

Check = Literal[
    "C1", "C2", "C3", "steps", "batches", "rounds", "decisions", "control", "records", "policies"
]
"""In report order."""

CHECKS: Final[dict[Check, str]] = {
    "C1": "one policy version, with its published digest, sampled each trajectory",
    "C2": "every dispatched group has exactly one outcome; nothing trains twice",
    "C3": "no group trains after its deadline",
    "steps": "steps are contiguous and unique; each starts from the previous weights",
    "batches": "each batch contains the records that count; digests match the log",
    "rounds": "the chain of rounds is complete and reproduces the recorded states",
    "decisions": "every decision follows from the records before it",
    "control": "every event is readable, belongs to this run and was possible at its offset",
    "records": "every trajectory record matches its event; none is missing or foreign",
    "policies": "weights, contributions and checkpoints of commits exist, unchanged",
}

MIXED: Final = (
    "declared off (partial_rollout): versions never decrease, from the dispatch to the trainer's, "
    "each served then with its published digest; evaluations are of one version"
)
"""C1 with partial rollout."""

NAMED_MAX: Final = 10_000
"""Further violations are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    check: Check
    subject: str
    """Id: a group, a trajectory, ``step 7``, ``round 12``, a file."""
    message: str
    expected: str = ""
    found: str = ""

    @property
    def line(self) -> str:
        detail = f": expected {self.expected}, found {self.found}" if self.expected else ""
        return f"{self.check} {self.subject}: {self.message}{detail}"


class Findings:
    """Collected violations and counts; `notes` are no violations."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.count: Counter[Check] = Counter()
        """Includes those not kept."""
        self.looked: Counter[Check] = Counter()
        self.notes: list[str] = []
        self.total = 0

    def add(
        self,
        check: Check,
        subject: str,
        message: str,
        *,
        expected: object = "",
        actual: object = "",
    ) -> None:
        self.count[check] += 1
        self.total += 1
        if len(self.violations) < NAMED_MAX:
            violation = Violation(
                check=check,
                subject=subject,
                message=message,
                expected=str(expected),
                found=str(actual),
            )
            self.violations.append(violation)

    def same(
        self, check: Check, subject: str, message: str, *, expected: object, actual: object
    ) -> bool:
        self.looked[check] += 1
        if expected == actual:
            return True
        self.add(check, subject, message, expected=expected, actual=actual)
        return False

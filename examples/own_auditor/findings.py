"""Findings of an audit, as lines."""

from __future__ import annotations


class Findings:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.looked = 0

    def add(self, check: str, subject: object, message: str) -> None:
        self.lines.append(f"{check} {subject}: {message}")

    def same(self, check: str, subject: object, what: str, expected: object, found: object) -> None:
        """Require equal values."""
        self.looked += 1
        if expected != found:
            self.add(check, subject, f"{what}: expected {expected}, found {found}")

    def holds(self, check: str, subject: object, what: str, condition: bool) -> None:
        """Require a condition; `what` describes its violation."""
        self.looked += 1
        if not condition:
            self.add(check, subject, what)

"""What does not hold, as lines."""

from __future__ import annotations


class Findings:
    """Lines of what does not hold, and how often something was looked at."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.looked = 0

    def add(self, check: str, subject: object, message: str) -> None:
        """Something does not hold."""
        self.lines.append(f"{check} {subject}: {message}")

    def same(self, check: str, subject: object, what: str, expected: object, found: object) -> None:
        """Two that must be equal."""
        self.looked += 1
        if expected != found:
            self.add(check, subject, f"{what}: expected {expected}, found {found}")

    def holds(self, check: str, subject: object, what: str, condition: bool) -> None:
        """Something that must not be: `what` is said where the condition does not hold."""
        self.looked += 1
        if not condition:
            self.add(check, subject, what)

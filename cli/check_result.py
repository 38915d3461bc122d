"""One row of `dora-pipe doctor`; it decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dora_pipe.core.errors import DoraError

State = Literal["ok", "note", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One thing looked at. `note` is no fault: something optional is not there."""

    what: str
    state: State
    detail: str


def failed(what: str, error: DoraError) -> CheckResult:
    """An error as a row, its hint included."""
    detail = f"{error.message}; {error.hint}" if error.hint else error.message
    return CheckResult(what=what, state="fail", detail=detail)

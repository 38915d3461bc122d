"""What an audit remembers is written as it is, or follows from what is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dora_pipe.audit.audit_state import _SAVED, AuditState, decode_state
from dora_pipe.core.errors import SchemaError

FOLLOWS = {
    *("findings.violations", "findings.count", "findings.total"),  # only what holds is kept
    *("ledger.accounts.groups", "ledger.accounts.open", "ledger.accounts.logged"),
    *("ledger.accounts.unread", "ledger.accounts.sibling_ended", "ledger.accounts._storage"),
    *("fold.state", "fold._anchor", "fold._since", "fold._since_bytes", "fold._samplers"),
    *("records.buried", "gathering._ends", "gathering._reads"),  # read anew by every look
    *("gathering.spilled", "gathering._source"),
}
"""What is found again, or written otherwise."""


def attributes(one: object, path: str = "") -> Iterator[str]:
    """Everything that an object remembers, by its path; who has been told of whom is left out."""
    for name, value in vars(one).items():
        if name in ("_ledger", "_findings") or (path == "ledger." and name == "findings"):
            continue
        whole = f"{path}{name}"
        if whole in _SAVED or whole in FOLLOWS or not hasattr(value, "__dict__"):
            yield whole
        else:
            yield from attributes(value, f"{whole}.")


def test_nothing_that_an_audit_remembers_is_forgotten() -> None:
    assert set(attributes(AuditState("run"))) == _SAVED.keys() | FOLLOWS


@pytest.mark.parametrize("data", [b"", b"\0" * 50, b"\x94\x90\x90\x90\xc4\x00"])
def test_bytes_that_are_no_audit_are_refused(data: bytes) -> None:
    with pytest.raises(SchemaError):
        decode_state(data)

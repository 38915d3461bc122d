"""What an audit remembers of the log that it has read, and the same as bytes.

Bytes are MessagePack of the types in `_SAVED`: whatever says anything else is refused. What follows
from the rest is not written, and found again. What bytes mean depends on the code: `fingerprint`
says which code wrote them.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

import dora_pipe.audit
import dora_pipe.config
from dora_pipe.audit.bound_ledger import BoundLedger
from dora_pipe.audit.check_fold import FoldCheck
from dora_pipe.audit.check_policies import PolicyCheck
from dora_pipe.audit.check_records import RecordCheck, Seen
from dora_pipe.audit.effective_config import EffectiveConfig
from dora_pipe.audit.entries import (
    Attempted,
    GroupEntry,
    Hosting,
    Logged,
    Moment,
    StepEntry,
    Taken,
    VersionEntry,
    WorkerEntry,
)
from dora_pipe.audit.evidence import Evidence, EvidenceBuffer, Place
from dora_pipe.audit.findings import Findings
from dora_pipe.audit.group_ledger import Sums
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.round_reader import Cursor
from dora_pipe.audit.row_ledger import RowLedger
from dora_pipe.config.model import Config
from dora_pipe.core.errors import SchemaError
from dora_pipe.orchestrator.snapshots import body_of, source_digest, state_of
from dora_pipe.schemas.control import Command, RoleStarted, RunStarted, WeightsAdopted


class AuditState:
    """Everything an audit remembers of the log that it has read."""

    def __init__(self, run: str, *, whole: bool = True) -> None:
        self.findings = Findings()
        self.ledger = Ledger(run, self.findings)
        self.fold = FoldCheck(self.findings, plans=whole)
        self.records = RecordCheck(self.ledger)
        self.policies = PolicyCheck(self.ledger)
        self.cursor = Cursor()
        self.gathering = EvidenceBuffer()
        self.shorter: list[str] = []
        """Partitions that were found shorter than they had been."""
        self.whole = whole
        """Values were opened and plans made again."""
        self.files = False
        """Policy files were looked at."""


_SAVED: Final[dict[str, Any]] = {
    "ledger.run": str,
    "whole": bool,
    "files": bool,
    "shorter": list[str],
    "cursor": Cursor,
    "findings.looked": dict[str, int],
    "findings.notes": list[str],
    "ledger.accounts.workers": dict[int, WorkerEntry],
    "ledger.accounts.records": int,
    "ledger.accounts.ended": dict[str, None],
    "ledger.accounts.sums": Sums,
    "ledger.accounts.attempts_max": int,
    "ledger.accounts.scored_together": frozenset[str],
    "ledger.started": RunStarted | None,
    "ledger.config": Config | None,
    "ledger.steps": dict[int, StepEntry],
    "ledger.versions": dict[int, VersionEntry],
    "ledger.version": int,
    "ledger.takes": dict[tuple[int, int], Taken],
    "ledger.unread_steps": list[StepEntry],
    "ledger.unread_versions": list[VersionEntry],
    "ledger.committed": int,
    "ledger.published": int,
    "ledger.not_trained": list[Attempted],
    "ledger.adopted": list[WeightsAdopted],
    "ledger.dropped": set[int],
    "ledger.commands": list[Command],
    "ledger.roles": list[RoleStarted],
    "ledger.unknown": dict[str, int],
    "ledger.rounds": int,
    "ledger.now_ns": int,
    "ledger.stopped": Moment | None,
    "ledger.hosting": Hosting,
    "ledger.legality.bound": BoundLedger,
    "ledger.legality.attempt": int,
    "ledger.legality.in_force": EffectiveConfig | None,
    "ledger.legality.ordinals": dict[str, int],
    "ledger.legality.rows": RowLedger,
    "fold.digests": int,
    "fold.plans": int,
    "fold.planner": str,
    "fold.makes_plans": bool,
    "fold.wrong": int,
    "records.seen": Seen,
    "policies.absent": dict[tuple[str, int], str],
    "policies.storeless": bool,
    "gathering.positions": dict[int, int],
    "gathering.last": dict[int, tuple[int, str]],
    "gathering.waiting": dict[Place, Evidence],
}
"""What is kept of an `AuditState`, and as what. Violations are not: only what holds is kept."""


class _Saved(msgspec.Struct, array_like=True):
    values: tuple[msgspec.Raw, ...]
    """In the order of `_SAVED`."""
    groups: tuple[bytes, ...]
    """The live ones."""
    unread: tuple[Place, ...]
    state: bytes
    """Of the fold."""


def _container(kind: Any, value: Any) -> Any:
    """A Counter of what msgspec has read as a dictionary."""
    return kind(value)


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final = {
    path: msgspec.msgpack.Decoder(kind, dec_hook=_container) for path, kind in _SAVED.items()
}
_GROUP: Final = msgspec.msgpack.Decoder(GroupEntry)


def encode_state(books: AuditState) -> bytes:
    """What an audit remembers, as bytes; the fold has not failed."""
    assert books.fold.state is not None
    accounts = books.ledger.accounts
    saved = _Saved(
        values=tuple(msgspec.Raw(_ENCODER.encode(attrgetter(path)(books))) for path in _SAVED),
        groups=tuple(encode_group(group) for group in accounts.groups.values()),
        unread=tuple(accounts.unread),
        state=body_of(books.fold.state).joined(),
    )
    return _ENCODER.encode(saved)


def decode_state(data: bytes) -> AuditState:
    """The same again. Raises SchemaError for bytes that say anything else."""
    try:
        saved = msgspec.msgpack.decode(data, type=_Saved)
        books = AuditState("")
        for (path, decoder), value in zip(_DECODERS.items(), saved.values, strict=True):
            _set(books, path, decoder.decode(value))
        _set_groups(books, saved)
        books.fold.go_on(state_of(saved.state))
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise SchemaError(f"no audit's books: {error}") from None
    return books


def _set(books: AuditState, path: str, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    parent = attrgetter(owner)(books) if owner else books
    current = getattr(parent, name)
    if isinstance(current, dict):  # a Counter, or what may be put away
        current.update(value)
    else:
        setattr(parent, name, value)


def _set_groups(books: AuditState, saved: _Saved) -> None:
    """The live groups, and what follows from them."""
    accounts = books.ledger.accounts
    for group in map(decode_group, saved.groups):
        name = group.spec.group
        accounts.groups[name] = group
        if group.fate is None:
            accounts.open[name] = group
        for logged in group.records:
            accounts.logged.setdefault(logged.place, logged)
    accounts.unread = {place: accounts.logged[place] for place in saved.unread}


def encode_group(group: GroupEntry) -> bytes:
    """A group with each record once: which of them are bound, their standing says."""
    for entry in group.requests.values():
        entry.bound = None
    encoded = _ENCODER.encode(group)
    _bind(group)
    return encoded


def decode_group(data: bytes) -> GroupEntry:
    """The group again. Raises msgspec.MsgspecError."""
    group = _GROUP.decode(data)
    _bind(group)
    return group


def _bind(group: GroupEntry) -> None:
    logged: Logged
    for logged in group.records:
        if logged.standing == "bound":
            group.requests[logged.fact.trajectory].bound = logged


@cache
def fingerprint() -> str:
    """sha256 over the code that what an audit finds depends on."""
    digest = hashlib.sha256(f"{sys.version} {source_digest()}".encode())
    for package in (dora_pipe.audit, dora_pipe.config):
        assert package.__file__ is not None
        for path in sorted(Path(package.__file__).parent.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()

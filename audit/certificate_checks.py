"""What of a certificate holds: its statement against itself, against files, against a log.

Pure: it is given what was read. Whatever does not hold is named by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from dora_pipe.audit.certificate import Audited, Made, Parent, TrainedAgain, differences
from dora_pipe.audit.report import AuditReport
from dora_pipe.audit.statement import Statement, files_of, weights_of

What = Literal["signature", "statement", "files", "weights", "log", "lineage", "audit"]

SHOWN: Final = 64
"""Characters of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was held against another. Example: ``Check(what="files", holds=False,
    words="config.json: certified ab12, found cd34")``."""

    what: What
    holds: bool | None
    """None: it could not be looked at, or nobody asked for it."""
    words: str


def check_statement(statement: Statement) -> Iterator[Check]:
    """Whether it says of its subjects what it says of the run, and of a run that held."""
    made, audit = statement.predicate.made, statement.predicate.audit
    named = weights_of(statement)
    if named != [made.weights.digest]:
        words = f"the weights among its subjects are {', '.join(named) or 'none'}"
        words = f"{words}, those of the version are {made.weights.digest}"
        yield Check(what="statement", holds=False, words=words)
    else:
        words = f"version {made.version} of {made.run}, {len(files_of(statement))} files"
        yield Check(what="statement", holds=True, words=words)
    if not audit.clean:
        words = f"it did not hold when it was certified: {audit.violations} violations"
        yield Check(what="audit", holds=False, words=f"{words}, {'; '.join(audit.first)}")


def check_files(statement: Statement, found: Mapping[str, str | None]) -> Iterator[Check]:
    """Every file by its sha256; `found` has None for one that cannot be read."""
    certified = files_of(statement)
    wrong = False
    for name in sorted({*certified, *found}):
        words = ""
        if name not in found:
            words = "is not there"
        elif name not in certified:
            words = "is not certified"
        elif found[name] != certified[name]:
            words = f"certified {certified[name]}, found {found[name] or 'nothing to read'}"
        if words:
            wrong = True
            yield Check(what="files", holds=False, words=f"{name}: {words}")
    if not wrong:
        yield Check(what="files", holds=True, words=f"{len(certified)} files have their sha256")


def check_made(certified: Made, found: Made) -> Iterator[Check]:
    """Everything that the log says of the version, computed again."""
    words = f"chain {found.log.chain} at round {found.log.round}"
    yield from _compared("log", certified, found, "", words)


def check_lineage(certified: Sequence[Parent], found: Sequence[Parent]) -> Iterator[Check]:
    """The runs before, as far as their logs are here."""
    for at, one in enumerate(certified):
        name = f"{one.run}@{one.version}"
        again = found[at] if at < len(found) else None
        if again is None and at and found[-1].known is None:
            yield Check(what="lineage", holds=None, words=f"{name}: not reached from here")
        elif again is None or (one.run, one.version, one.digest) != (
            again.run,
            again.version,
            again.digest,
        ):
            there = "nothing" if again is None else f"{again.run}@{again.version} {again.digest}"
            words = f"{name}: certified {one.digest}, the log has {there}"
            yield Check(what="lineage", holds=False, words=words)
        else:
            yield from _parents_compared(name, one.known, again.known)
    if len(found) > len(certified):
        extra = found[len(certified)]
        beyond = not certified or certified[-1].known is not None
        words = f"{extra.run}@{extra.version}: is not in the certificate"
        yield Check(what="lineage", holds=False if beyond else None, words=words)


def _parents_compared(
    name: str, certified: Made | TrainedAgain | None, found: Made | TrainedAgain | None
) -> Iterator[Check]:
    if found is None:
        yield Check(what="lineage", holds=None, words=f"{name}: its log is not here")
    elif certified is None:
        words = f"{name}: its log was not there when this was certified"
        yield Check(what="lineage", holds=None, words=words)
    elif isinstance(found, Made):
        words = f"chain {found.log.chain} at round {found.log.round}"
        yield from _compared("lineage", certified, found, f"{name}: ", words)
    else:
        last = found.first + found.steps - 1
        words = f"steps {found.first} to {last} of {found.source}, trained again: {found.digest}"
        yield from _compared("lineage", certified, found, f"{name}: ", words)


def check_audit(certified: Audited, found: AuditReport, chain: str) -> Iterator[Check]:
    """The log as it is now; `chain` is that of the last round that was certified (hex)."""
    if chain != certified.chain:
        words = f"round {certified.rounds - 1}: certified chain {certified.chain}"
        yield Check(what="audit", holds=False, words=f"{words}, the log has {chain or 'none'}")
    for one in found.violations:
        yield Check(what="audit", holds=False, words=one.line)
    if found.holds and chain == certified.chain:
        words = f"clean, {found.rounds} rounds, {certified.rounds} of them certified"
        yield Check(what="audit", holds=True, words=words)


def _compared(
    what: What, certified: msgspec.Struct, found: msgspec.Struct, before: str, words: str
) -> Iterator[Check]:
    """Every leaf that differs, or `words` of two that are equal."""
    wrong = False
    for path, one, other in differences(certified, found):
        wrong = True
        said = f"{before}{path}: certified {_shown(one)}, the log has {_shown(other)}"
        yield Check(what=what, holds=False, words=said)
    if not wrong:
        yield Check(what=what, holds=True, words=f"{before}{words}")


def _shown(value: Any) -> str:
    said = str(value)
    return said if len(said) <= SHOWN else f"{said[: SHOWN - 3]}..."

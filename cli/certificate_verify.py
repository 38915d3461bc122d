"""`certificate verify`: holds a certificate against a key, the files of a model, a run's log."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from dora_pipe.audit.certificate import chain_at, made_of
from dora_pipe.audit.certificate_checks import (
    Check,
    check_audit,
    check_files,
    check_lineage,
    check_made,
    check_statement,
)
from dora_pipe.audit.signatures import (
    BadSignature,
    is_signed_by,
    key_ids,
    keyid_of,
    kind_of,
    open_public,
    verify_bundle,
)
from dora_pipe.audit.statement import (
    SignedStatement,
    Statement,
    files_below,
    read_file,
    read_statement,
    sha256_of_file,
)
from dora_pipe.cli.audit import AuditSession
from dora_pipe.cli.certificate import DIGITS, parents_of
from dora_pipe.cli.output import emit_json, emit_line
from dora_pipe.core.console import say
from dora_pipe.core.errors import InvariantBroken, PolicyError, SchemaError, UsageError
from dora_pipe.launch.fork_server import ForkedHelpers
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.store.adapters import FOLDER as ADAPTER
from dora_pipe.store.model_dir import weights_digest

SHOWN: Final = 30
"""Lines of what does not hold; `--json` has every one."""

VERDICTS: Final = {True: "holds", False: "DOES NOT HOLD", None: "NOT CHECKED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What a certificate is held against."""

    key: Path | None = None
    model: Path | None = None
    run: str = ""
    identity: str = ""
    """Who has signed a sigstore bundle."""
    issuer: str = ""
    trusted_root: Path | None = None

    @property
    def anything(self) -> bool:
        """Whether there is something to hold it against."""
        return bool(self.key or self.model or self.run or self.identity)


def read_certificate(file: Path, against: Against) -> tuple[Statement, list[Check]]:
    """A certificate, with what was found of its signature and of its own words.

    Raises UsageError for what is none, SchemaError for one that cannot be read.
    """
    if not against.anything:
        raise UsageError(
            "there is nothing to hold it against",
            hint="--key PUB for its signature, --model DIR for the files, --run RUN for the log",
        )
    signed = read_file(file)
    signature = check_signature(signed, against)
    statement = read_statement(signed)
    return statement, [signature, *check_statement(statement)]


def check_signature(found: SignedStatement, against: Against) -> Check:
    """Whether it is signed by whom it ought to be. Raises UsageError."""
    if not found.signed:
        words = "UNSIGNED: anybody could have written it"
        asked = against.key or against.identity
        return Check(what="signature", holds=False if asked else None, words=words)
    if against.key is not None:
        key = open_public(against.key)
        words = f"{kind_of(key)}, key {keyid_of(key)[:DIGITS]}"
        if is_signed_by(found, key):
            return Check(what="signature", holds=True, words=words)
        ids = ", ".join(one[:DIGITS] for one in key_ids(found))
        words = f"not by {words}, or it was changed since; it says: {ids}"
        return Check(what="signature", holds=False, words=words)
    if found.bundle and against.identity:
        try:
            verify_bundle(found, against.identity, against.issuer, against.trusted_root)
        except BadSignature as error:
            return Check(what="signature", holds=False, words=f"sigstore: {error}")
        return Check(what="signature", holds=True, words=f"sigstore, {against.identity}")
    if against.identity:
        words = "a key has signed it, and no identity: --key PUB"
        return Check(what="signature", holds=False, words=words)
    how = "--identity NAME --issuer URL" if found.bundle else "--key PUB"
    words = f"{how} checks it; until then anybody could have written it"
    return Check(what="signature", holds=None, words=words)


def check_model(statement: Statement, model: Path, file: Path) -> Iterator[Check]:
    """The files of a directory, and their weights as a run would know them. Raises UsageError."""
    if not model.is_dir():
        raise UsageError(f"no model directory at {model}")
    names = files_below(model)
    own = [one for one in names if (model / one).resolve() != file.resolve()]
    yield from check_files(statement, {one: _sha256(model / one) for one in own})
    weights = statement.predicate.made.weights
    if (model / ADAPTER).is_dir():
        words = "of an adapter: its files were looked at"
        yield Check(what="weights", holds=None, words=words)
        return
    try:
        found = weights_digest(model, "bfloat16" if weights.dtype == "bfloat16" else "float32")
    except PolicyError as error:
        yield Check(what="weights", holds=False, words=error.message)
        return
    words = f"digest {found}"
    if found != weights.digest:
        words = f"certified digest {weights.digest}, found {found}"
    yield Check(what="weights", holds=found == weights.digest, words=words)


def check_run(
    statement: Statement, run: OpenRun, forks: ForkedHelpers, root: Path
) -> Iterator[Check]:
    """Everything in the predicate once more, from this log, and an audit of all of it."""
    predicate = statement.predicate
    try:
        made, lineage = made_of(run.bus, run.topics, predicate.made.version)
    except (InvariantBroken, SchemaError, UsageError) as error:
        yield Check(what="log", holds=False, words=error.message)
    else:
        yield from check_made(predicate.made, made)
        try:
            yield from check_lineage(predicate.lineage, parents_of(lineage, root))
        except (InvariantBroken, UsageError) as error:
            yield Check(what="lineage", holds=False, words=error.message)
    with tempfile.TemporaryDirectory(prefix="dora-pipe-") as folder:
        # What is remembered beside a run is as good as who could write there.
        index = Path(folder) / "audit"
        session = AuditSession(run, forks, index, store=True, quick=False, fresh=True)
        report = session.once()
    try:
        chain = chain_at(run.bus, run.topics, predicate.audit.rounds - 1)
    except InvariantBroken as error:
        chain = error.message
    yield from check_audit(predicate.audit, report, chain)


def conclude(file: Path, statement: Statement, checks: Sequence[Check], *, as_json: bool) -> None:
    """Print what holds and what does not. Raises InvariantBroken with the first that does not."""
    wrong = [one for one in checks if one.holds is False]
    made = statement.predicate.made
    if as_json:
        emit_json(
            {
                "file": str(file),
                "run": made.run,
                "version": made.version,
                "holds": not wrong,
                "checks": [asdict(one) for one in checks],
            }
        )
    else:
        for one in [*(one for one in checks if one.holds is not False), *wrong[:SHOWN]]:
            emit_line(f"{one.what:10} {VERDICTS[one.holds]:14} {one.words}")
        if len(wrong) > SHOWN:
            emit_line(f"and {len(wrong) - SHOWN} more that do not hold")
    if checks[0].holds is None:
        say(f"the signature was NOT CHECKED: {checks[0].words}")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise InvariantBroken(f"{file}: {wrong[0].what}: {wrong[0].words}{more}")


def _sha256(path: Path) -> str | None:
    try:
        return sha256_of_file(path)
    except OSError:
        return None

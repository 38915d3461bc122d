"""`certificate`: exports a version, audits its run, and writes what its weights are made of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version as version_of_package
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from dora_pipe.audit.certificate import GENERATIONS_MAX, Audited, Parent, Predicate, made_of
from dora_pipe.audit.certificate_again import again_of
from dora_pipe.audit.report import AuditReport
from dora_pipe.audit.signatures import Signed, Signer
from dora_pipe.audit.statement import enveloped, statement_bytes, subjects_of
from dora_pipe.cli.audit import AuditSession
from dora_pipe.cli.export import version_of, write_policy
from dora_pipe.cli.options import may_write_file, may_write_folder
from dora_pipe.cli.output import emit_json, emit_line, emit_table
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.core.errors import InvariantBroken, ResourceError, UsageError
from dora_pipe.launch.fork_server import ForkedHelpers
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.schemas.control import Lineage

SUFFIX: Final = ".intoto.json"
PASSWORD: Final = "DORA_PIPE_KEY_PASSWORD"
"""Variable of the environment: of the private key."""

VIOLATIONS: Final = 5
"""Of an audit that is not clean, in a certificate."""

ROWS: Final = 10
"""Versions in the table; the certificate has every one."""

DIGITS: Final = 16
"""Of a digest, in a line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateRequest:
    """What is certified, and where it goes."""

    run: str
    policy: str
    """A version's number, or `best`."""
    key: Path | None
    out: Path | None
    model: Path | None
    """Where the export stays; None: it is made beside the certificate, and removed."""
    force: bool


def parsed(words: str) -> tuple[str, str]:
    """A run and a version of it. Raises UsageError. Example: ``parsed("demo@20")``."""
    run, at, policy = words.rpartition("@")
    if not at or not run or not (policy.isdecimal() or policy == "best"):
        raise UsageError(f"not RUN@STEP: {words!r}", hint="e.g. certificate demo@20, or demo@best")
    return run, policy


def signer_of(key: Path | None) -> Signer | None:
    """The private key, if there is one. Raises UsageError."""
    if key is None:
        return None
    password = os.environ.get(PASSWORD)
    return Signer.open(key, None if password is None else password.encode())


def certify(
    run: OpenRun,
    wanted: CertificateRequest,
    signer: Signer | None,
    forks: ForkedHelpers,
    root: Path,
    *,
    as_json: bool,
) -> None:
    """Write a certificate. Raises UsageError, PolicyError where the version cannot be exported,
    InvariantBroken where rounds do not hold, and, behind the rest, for an audit that is not clean.
    """
    version = version_of(run, wanted.policy)
    out = wanted.out or Path(f"{run.topics.run}@{version}{SUFFIX}")
    may_write_file(out, force=wanted.force)
    if wanted.model is not None:
        may_write_folder(wanted.model, force=wanted.force)
    made, lineage = made_of(run.bus, run.topics, version)
    parents = parents_of(lineage, root)
    audited, report = _audited(run, forks, out)
    predicate = Predicate(made=made, lineage=parents, audit=audited)
    with _directory(out, wanted.model) as directory:
        digest = write_policy(run, version, directory)
        if digest != made.weights.digest:
            raise InvariantBroken(
                f"version {version} was exported with the weights {digest}, and the log has "
                f"{made.weights.digest}",
                hint="the tables beside the run are of another log: delete catalogue.duckdb",
            )
        subjects = subjects_of(directory, f"{made.run}@{version}", digest)
    payload = statement_bytes(subjects, predicate)
    signed = None if signer is None else signer.sign(payload)
    _write(
        out,
        payload + b"\n" if signed is None else enveloped(payload, signed.keyid, signed.signature),
    )
    _audit_index(out).unlink(missing_ok=True)
    if as_json:
        said = None if signed is None else {"kind": signed.kind, "keyid": signed.keyid}
        emit_json({"file": str(out), "signed": said, **msgspec.json.decode(payload)})
    else:
        _print(out, signed, predicate, len(subjects) - 1)
    _warn(out, signed, parents)
    if not report.holds:
        raise InvariantBroken(
            f"{out} says that the run does not hold: {audited.first[0]}",
            hint="`dora-pipe audit` names all of it",
        )


def parents_of(lineage: Lineage | None, root: Path) -> tuple[Parent, ...]:
    """The runs that a run came from, the nearest first, up to one whose log is not here.

    Raises InvariantBroken, UsageError where a run of that name here does not have those weights, or
    not yet the round that folds them.
    """
    found: list[Parent] = []
    while lineage is not None and len(found) < GENERATIONS_MAX:
        parent, lineage = _parent(lineage, root)
        found.append(parent)
    return tuple(found)


def _parent(lineage: Lineage, root: Path) -> tuple[Parent, Lineage | None]:
    named = Parent(run=lineage.run, version=lineage.step, digest=lineage.digest, made=None)
    with ExitStack() as stack:
        try:
            run = stack.enter_context(opened(lineage.run, root))
        except UsageError:
            return named, None
        clock = SystemClock()
        history = read_history(run.bus, run.topics, clock)
        again, digest, above = again_of(run.bus, run.topics, history, lineage.step, clock)
        if again is not None:
            found = replace(named, again=again)
        else:
            made, above = made_of(run.bus, run.topics, lineage.step)
            found, digest = replace(named, made=made), made.weights.digest
    if digest != lineage.digest:
        raise InvariantBroken(
            f"lineage: version {lineage.step} of {lineage.run} has the weights "
            f"{digest} here, and the run began with {lineage.digest}",
            hint="is it another run of that name? --runs DIR says where runs lie",
        )
    return found, above


def audited_of(report: AuditReport, chain: str) -> Audited:
    """What a report says, for a certificate."""
    return Audited(
        package=version_of_package("dora-pipe"),
        clean=report.holds,
        violations=report.violations_total,
        first=tuple(one.line for one in report.violations[:VIOLATIONS]),
        rounds=report.rounds,
        chain=chain,
        records=report.records,
    )


def _audited(run: OpenRun, forks: ForkedHelpers, out: Path) -> tuple[Audited, AuditReport]:
    """An audit from the beginning; one that was ended goes on where it was."""
    session = AuditSession(run, forks, _audit_index(out), store=True, quick=False, fresh=False)
    report = session.once()
    return audited_of(report, session.chain), report


def _audit_index(out: Path) -> Path:
    """Of its own, for as long as it takes: what other audits remember of a run is not believed."""
    return out.with_name(f".{out.name}.audit")


@contextmanager
def _directory(out: Path, model: Path | None) -> Iterator[Path]:
    """Where the export goes; one that nobody wanted is removed, also that of an earlier try."""
    if model is not None:
        yield model
        return
    folder = out.with_name(f".{out.name}.model")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(out: Path, data: bytes) -> None:
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(out)
    except OSError as error:
        raise ResourceError(f"cannot write {out}: {error.strerror or error}") from error


def _warn(out: Path, signed: Signed | None, parents: tuple[Parent, ...]) -> None:
    if signed is None:
        say(f"UNSIGNED: anybody could have written {out}; --key FILE signs it")
    for one in parents:
        if one.known is None:
            say(f"note: the log of {one.run}, which it came from, is not here: it is only named")


def _print(out: Path, signed: Signed | None, predicate: Predicate, files: int) -> None:
    made, audit, trained = predicate.made, predicate.audit, predicate.made.trained
    by = "UNSIGNED" if signed is None else f"signed, {signed.kind}, key {signed.keyid[:DIGITS]}"
    lines = {
        "certificate": f"{out}, {by}",
        "weights": f"{made.weights.digest}, version {made.version} of {made.run}, {files} files",
        "base model": f"{made.base.name}, weights {made.base.digest[:DIGITS]}",
        "trained": f"{trained.steps} steps, {trained.groups} groups, "
        f"{trained.trajectories} trajectories, {trained.tokens} tokens",
        "log": f"chain {made.log.chain} at round {made.log.round}",
        "configuration": f"{made.configuration.digest[:DIGITS]}, seed {made.configuration.seed}",
        "rewards": ", ".join(one[:DIGITS] or "unknown" for one in made.code.rewards),
        "lineage": ", ".join(f"{one.run}@{one.version}" for one in predicate.lineage) or "none",
        "audit": f"{'clean' if audit.clean else 'NOT CLEAN'}, {audit.rounds} rounds, "
        f"{audit.records} records",
    }
    for name, words in lines.items():
        emit_line(f"{name:14} {words}")
    emit_line()
    emit_table(
        ("data", "rows", "digest", "groups", "trajectories", "tokens"),
        [
            (one.source, one.rows, one.digest[:DIGITS], one.groups, one.trajectories, one.tokens)
            for one in made.data
        ],
    )
    if trained.versions:
        emit_line()
        most = sorted(trained.versions, key=lambda one: (-one.tokens, one.version))[:ROWS]
        emit_table(
            ("sampled by version", "weights", "groups", "trajectories", "tokens", "share"),
            [
                (
                    one.version,
                    one.digest[:DIGITS],
                    one.groups,
                    one.trajectories,
                    one.tokens,
                    f"{one.share:.1%}",
                )
                for one in sorted(most, key=lambda one: one.version)
            ],
        )

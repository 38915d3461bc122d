"""Commands that certify what weights are made of, and look whether that holds."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.cli.options import ArchiveOption, ForceOption, JsonOption, RunsOption
from dora_pipe.core.console import RUNS


def make(
    what: Annotated[
        str, typer.Argument(metavar="RUN@STEP", help="A version of a run: demo@20, demo@best.")
    ],
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Private key in PEM, Ed25519 or ECDSA; without: UNSIGNED."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default RUN@STEP.intoto.json here.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also keep the exported model there.")
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Write what a version's weights are made of, as an in-toto statement, and sign it. It is
    exported and the run is audited on the way; exit code 5 where that does not hold."""
    from dora_pipe.cli.audit import COLLECT_AFTER, help_audit
    from dora_pipe.cli.certificate import CertificateRequest, certify, parsed, signer_of
    from dora_pipe.launch.fork_server import ForkedHelpers
    from dora_pipe.launch.run_dir import opened

    run, policy = parsed(what)
    wanted = CertificateRequest(run=run, policy=policy, key=key, out=out, model=model, force=force)
    signer = signer_of(key)
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    with ForkedHelpers(help_audit) as forks, opened(run, root, archive) as found:
        certify(found, wanted, signer, forks, root, as_json=as_json)


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A certificate.")],
    key: Annotated[
        Path | None, typer.Option(metavar="PUB", help="The public key in PEM of who signed it.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model that it is said to be of.")
    ] = None,
    run: Annotated[
        str, typer.Option(metavar="RUN", help="The run, whose log says everything once more.")
    ] = "",
    identity: Annotated[
        str, typer.Option(metavar="NAME", help="Of a sigstore bundle: who signed it.")
    ] = "",
    issuer: Annotated[str, typer.Option(metavar="URL", help="With --identity: who says so.")] = "",
    trusted_root: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of a sigstore that is not the public one.")
    ] = None,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Hold a certificate against a key, the files of a model and a run's log; nothing is fetched.
    Exit code 5 for what does not hold, each named."""
    from dora_pipe.cli.audit import COLLECT_AFTER, help_audit
    from dora_pipe.cli.certificate_verify import (
        Against,
        check_model,
        check_run,
        conclude,
        read_certificate,
    )
    from dora_pipe.launch.fork_server import ForkedHelpers
    from dora_pipe.launch.run_dir import opened

    against = Against(
        key=key, model=model, run=run, identity=identity, issuer=issuer, trusted_root=trusted_root
    )
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    with ForkedHelpers(help_audit) if run else nullcontext() as forks:
        statement, checks = read_certificate(file, against)
        if model is not None:
            checks += check_model(statement, model, file)
        if forks is not None:
            with opened(run, root, archive) as found:
                checks += check_run(statement, found, forks, root)
    conclude(file, statement, checks, as_json=as_json)

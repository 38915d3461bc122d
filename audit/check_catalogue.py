"""Holds the catalogue that is kept beside a run against the ledger: two accounts of one log."""

from __future__ import annotations

from typing import Final

from dora_pipe.audit.findings import Findings
from dora_pipe.audit.ledger import Ledger
from dora_pipe.catalogue.database import Catalogue

BY_FATE: Final = """select fate, count(*), sum(results)::bigint, sum(tokens)::bigint
from groups group by fate"""

BY_STALENESS: Final = """select staleness, count(*) from groups
where staleness is not null group by staleness"""


def check_catalogue(catalogue: Catalogue, ledger: Ledger, findings: Findings) -> None:
    """Groups, trajectories and tokens by fate, staleness, records, steps, versions."""
    sums = ledger.accounts.summed()
    fates = {
        fate: (groups, sums.trajectories[fate], sums.tokens[fate])
        for fate, groups in sums.groups.items()
        if groups
    }
    staleness = {value: groups for value, groups in sums.staleness.items() if groups}
    one = catalogue.one
    _same(findings, "groups", fates, {row[0]: row[1:] for row in catalogue.query(BY_FATE)})
    _same(findings, "staleness", staleness, dict(catalogue.query(BY_STALENESS)))
    _same(findings, "records", (ledger.accounts.records,), one("select count(*) from records"))
    _same(findings, "steps", (ledger.committed,), one("select count(*) from steps"))
    _same(findings, "versions", (ledger.published,), one("select count(*) from versions"))


def _same(findings: Findings, table: str, expected: object, found: object) -> None:
    message = "the catalogue beside the run was changed, or counts otherwise"
    findings.same("catalogue", table, message, expected=expected, found=found)

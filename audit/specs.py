"""Decides whether a dispatched group is stamped as identity without chance wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_pipe.config.model import Config
from dora_pipe.schemas import identity
from dora_pipe.schemas.batch import deadline_of
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.rounds import GroupSpec

if TYPE_CHECKING:
    from dora_pipe.audit.ledger import Ledger

NO_DEADLINE = -1
"""Of evaluation groups."""


def check_spec(spec: GroupSpec, ordinal: int, ledger: Ledger, config: Config) -> None:
    """Everything a dispatch stamps must follow from the log before it, and from its ordinal."""
    started = ledger.started
    assert started is not None
    findings, who = ledger.findings, spec.group
    wanted = _expected(spec, started, config, ordinal)
    findings.looked["decisions"] += len(wanted)
    for name, expected in wanted.items():
        if (found := getattr(spec, name)) != expected:
            message = f"is dispatched with a wrong {name.replace('_', ' ')}"
            findings.add("decisions", who, message, expected=expected, found=found)
    newest = ledger.version
    message = "is not dispatched under the newest version"
    findings.same("decisions", who, message, expected=newest, found=spec.version)
    version = ledger.versions.get(spec.version)
    if version is None:
        findings.add("C1", who, f"is dispatched under version {spec.version}, never published")
        return
    message = f"is dispatched with other weights than the published ones of version {spec.version}"
    findings.same("C1", who, message, expected=version.digest, found=spec.digest)


def _expected(
    spec: GroupSpec, started: RunStarted, config: Config, ordinal: int
) -> dict[str, int | str]:
    seed = started.seed
    common: dict[str, int | str] = {
        "ordinal": ordinal,
        "group": identity.group_id(spec.purpose, ordinal),
        "partition": identity.partition_of(ordinal, config.bus.partitions),
    }
    if spec.purpose == "eval":
        return common | {
            "deadline": NO_DEADLINE,
            "dataset_digest": started.eval_digest,
            "seed": identity.group_seed(seed, "eval", spec.index),
            "size": config.evaluation.siblings,
        }
    data_epoch, index = identity.prompt_index(seed, ordinal, started.dataset_rows)
    return common | {
        "deadline": deadline_of(spec.version, config.staleness.max_staleness),
        "dataset_digest": started.dataset_digest,
        "data_epoch": data_epoch,
        "index": index,
        "seed": identity.group_seed(seed, "train", ordinal),
        "size": config.groups.size,
    }

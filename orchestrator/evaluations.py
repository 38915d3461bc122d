"""Groups of evaluations; equal for every version, including random streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dora_pipe.config.model import Config, Evaluation
from dora_pipe.orchestrator.staleness import EVALUATION_DEADLINE
from dora_pipe.schemas.control import DataSet
from dora_pipe.schemas.identity import group_id, group_seed, partition_of, source_of
from dora_pipe.schemas.rounds import GroupSpec


class EvaluationFacts(Protocol):
    """Fields of `run started` that evaluations use."""

    @property
    def seed(self) -> int:
        """Run seed."""

    @property
    def eval_digest(self) -> str:
        """Digest of the data."""

    @property
    def eval_rows(self) -> int:
        """Rows of the data."""

    @property
    def datasets(self) -> Mapping[str, DataSet]:
        """Data by named source."""


def evaluation_rows(facts: EvaluationFacts, evaluation: Evaluation) -> int:
    data = facts.datasets.get(source_of("eval", evaluation.name))
    return min(evaluation.prompts, data.rows if data else facts.eval_rows)


def evaluation_group(
    facts: EvaluationFacts,
    config: Config,
    evaluation: Evaluation,
    row: int,
    *,
    ordinal: int,
    version: int,
    digest: str,
) -> GroupSpec:
    """Return one row's group for a version."""
    data = facts.datasets.get(source_of("eval", evaluation.name))
    return GroupSpec(
        group=group_id("eval", ordinal),
        ordinal=ordinal,
        purpose="eval",
        version=version,
        digest=digest,
        deadline=EVALUATION_DEADLINE,
        partition=partition_of(ordinal, config.bus.partitions),
        dataset_digest=data.digest if data else facts.eval_digest,
        index=row,
        data_epoch=0,
        seed=group_seed(facts.seed, "eval", row),
        size=evaluation.group_size,
        task=config.task_of(evaluation).name,
        evaluation=evaluation.name,
    )

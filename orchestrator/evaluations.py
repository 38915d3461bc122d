"""Groups of evaluations; equal for every version, including random streams."""

from __future__ import annotations

from dora_pipe.config.model import Config, Evaluation
from dora_pipe.orchestrator.entities import Facts
from dora_pipe.orchestrator.staleness import EVALUATION_DEADLINE
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.identity import group_id, group_seed, partition_of, source_of
from dora_pipe.schemas.rounds import GroupSpec


def evaluation_rows(facts: Facts | RunStarted, evaluation: Evaluation) -> int:
    data = facts.datasets.get(source_of("eval", evaluation.name))
    return min(evaluation.prompts, data.rows if data else facts.eval_rows)


def evaluation_group(
    facts: Facts | RunStarted,
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

"""Tests that oversized decisions are rejected at startup."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dora_pipe.bus.base import records_of
from dora_pipe.config.checks import ROUND_DECISIONS_MAX, commit_problem, round_bytes
from dora_pipe.config.load import load_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import ConfigError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.orchestrator.planner import DECISIONS_MAX
from dora_pipe.schemas.wire import RECORD_BYTES_MAX
from tests.support import orchestrator_records as records
from tests.support.orchestrator_world import World

SMALL = """
[run]
name = "small"
steps = 3
[model]
path = "models/tiny"
[task]
kind = "arithmetic"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    return path


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert "\n" not in caught.value.message
    return caught.value


def largest_round_bytes(config: Config, seed: int) -> int:
    workers = {f"w{number}": (64, 16) for number in range(4)}
    world = World(seed=seed, config=config, workers=workers, eval_rows=60)
    world.run()
    decisions = TopicPartition(world.topics.decisions, 0)
    return max(
        len(record.value) for record in records_of(world.bus, {decisions: world.bus.end(decisions)})
    )


def test_the_planner_cuts_plans_where_the_check_thinks() -> None:
    assert DECISIONS_MAX == ROUND_DECISIONS_MAX


@pytest.mark.parametrize("seed", range(6))
def test_no_round_of_a_run_is_larger_than_the_check_thinks(seed: int) -> None:
    chance = random.Random(seed)
    config = records.make_config(
        run__steps=3,
        rollout__group_size=chance.choice([1, 2, 8]),
        rollout__prompts_per_step=chance.choice([4, 16, 40]),
        rollout__min_valid_trajectories=1,
        staleness__max_staleness=2,
        evaluation__prompts=chance.choice([0, 4, 60]),
    )
    actual_bytes, thought = largest_round_bytes(config, seed), round_bytes(config)
    assert actual_bytes <= thought
    assert thought < 6 * actual_bytes + 8192, "a check that refuses what would fit is no use either"


def test_a_batch_beyond_the_records_of_the_log_is_refused_with_the_size_that_it_needs(
    file: Path,
) -> None:
    small = ["bus.max_record_bytes=65536", "evaluation.prompts=8"]
    load_config(file, [*small, "rollout.prompts_per_step=8"])
    error = refusal(file, *small, "rollout.prompts_per_step=64")
    assert error.message.startswith("bus.max_record_bytes: a round of 64 groups of 8")
    assert "a record may have 65536" in error.message
    assert error.hint is not None
    needed = error.hint.split(" = ")[1].split()[0]
    load_config(file, [*small, "rollout.prompts_per_step=64", f"bus.max_record_bytes={needed}"])
    refusal(file, *small, "rollout.prompts_per_step=64", f"bus.max_record_bytes={int(needed) - 1}")


def test_a_batch_beyond_any_decision_is_refused_whatever_the_log_takes(file: Path) -> None:
    error = refusal(file, "rollout.prompts_per_step=40000", "bus.max_record_bytes=32505856")
    assert error.message.startswith("rollout.prompts_per_step: a round of 40000 groups of 8")
    assert f"a decision may have {RECORD_BYTES_MAX}" in error.message
    assert error.hint is not None and "fewer groups" in error.hint


def test_an_evaluation_counts_too_for_its_groups_are_dispatched_at_once(file: Path) -> None:
    error = refusal(file, "bus.max_record_bytes=262144", "evaluation.prompts=2000")
    assert "2000 evaluation.prompts" in error.message


def test_a_commit_names_the_tensors_too_and_is_refused_with_the_size_that_it_needs(
    file: Path,
) -> None:
    small, names = ["bus.max_record_bytes=131072", "evaluation.prompts=0"], 200_000
    config = load_config(file, [*small, "rollout.prompts_per_step=8"])
    assert commit_problem(config, 1000) is None
    problem = commit_problem(config, names)
    assert problem is not None and problem.hint is not None
    assert f"{names} of them the names of the model's tensors" in problem.text
    needed = problem.hint.split(" = ")[1].split()[0]
    raised = load_config(
        file, [*small, "rollout.prompts_per_step=8", f"bus.max_record_bytes={needed}"]
    )
    assert commit_problem(raised, names) is None
    assert commit_problem(raised, names + 1) is not None


def test_no_key_makes_a_commit_fit_that_no_reader_would_take(file: Path) -> None:
    config = load_config(file, ["evaluation.prompts=0"])
    problem = commit_problem(config, RECORD_BYTES_MAX)
    assert problem is not None and problem.hint is not None and "fewer groups" in problem.hint


def test_commits_of_an_adapter_name_few_tensors(file: Path) -> None:
    config = load_config(file, ["lora.rank=8"])
    assert commit_problem(config, RECORD_BYTES_MAX) is None

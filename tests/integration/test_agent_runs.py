"""A whole run whose rollouts are a script of the package `openai`: two sub-agents at the same time,
several turns, a compaction. What the script was told is what the log has, each token once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.agent_run import (
    check_answers_stand_behind_their_prompts,
    check_calls_end_where_they_asked,
    check_sampled_tokens_are_logged_once,
    furnish_agent,
)
from tests.support.user_run import assert_clean, call, call_here, furnish, steps


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    agent = furnish_agent(furnish(tmp_path_factory.mktemp("agent")))
    assert call(agent, "run", "config.toml") == 0, (agent / "said").read_text()
    return agent


def test_what_the_script_was_told_is_what_the_log_has_each_token_once(directory: Path) -> None:
    assert steps(directory, "tiny") == [0, 1]
    check_sampled_tokens_are_logged_once(directory)


def test_every_answer_stands_behind_its_prompt_in_a_context(directory: Path) -> None:
    check_answers_stand_behind_their_prompts(directory)


def test_calls_end_sampling_where_they_asked_for_it(directory: Path) -> None:
    check_calls_end_where_they_asked(directory)


def test_the_run_holds_and_is_made_again(directory: Path) -> None:
    assert_clean(directory, "tiny")
    assert call_here(directory, "replay", "tiny") == 0, (directory / "said").read_text()
    assert call_here(directory, "replay", "tiny", "--random", "4") == 0, (
        directory / "said"
    ).read_text()
    assert "4 of 4 trajectories bit-equal" in (directory / "said").read_text()

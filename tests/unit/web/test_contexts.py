"""Tests of the context tree on a trajectory's page."""

from __future__ import annotations

from dora_pipe.observe.describe import record_sections
from dora_pipe.observe.web.pages import tree_of
from dora_pipe.observe.web.view import HIDDEN
from tests.golden.arrow_values import PLAIN_TRAJECTORY
from tests.golden.branched_values import BRANCHED_TRAJECTORY


def test_a_trajectory_of_one_context_without_calls_has_no_tree() -> None:
    assert tree_of(PLAIN_TRAJECTORY) is None


def test_contexts_name_their_parents_and_what_they_share_with_them() -> None:
    tree = tree_of(BRANCHED_TRAJECTORY)
    assert tree is not None
    assert tree["contexts"] == [[None, 0, 0, 8], [None, 0, 8, 12], [0, 3, 12, 13], [2, 4, 13, 16]]
    assert tree["shared"] == [[], [], [(0, 3)], [(0, 3), (12, 13)]]


def test_calls_have_their_context_caller_and_what_they_asked_for() -> None:
    (row,) = record_sections(BRANCHED_TRAJECTORY, lambda text: text)["calls"]
    assert (row["context"], row["caller"], row["prompt tokens"], row["tokens"]) == (
        0,
        "planner",
        3,
        2,
    )
    assert row["ignored settings"] == '{"temperature":0.5}'


def test_what_an_agent_said_is_hidden_where_texts_are() -> None:
    (row,) = record_sections(BRANCHED_TRAJECTORY, lambda text: HIDDEN if text else text)["calls"]
    assert (row["caller"], row["ignored settings"]) == (HIDDEN, HIDDEN)

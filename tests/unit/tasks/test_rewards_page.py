"""Tests of docs/rewards.md: every reward and every kind of test."""

from __future__ import annotations

import re

import msgspec

from dora_pipe.producers.rewards.programs import read_tests
from dora_pipe.producers.rewards.registry import BUILT_IN
from tests.support import pages
from tests.support.tidy import ROOT


def test_every_kind_of_tests_of_the_page_is_read() -> None:
    lines = pages.block("json", '"tests"').splitlines()
    rows = [msgspec.json.decode(line) for line in lines]
    assert [len(read_tests(row["tests"])) for row in rows] == [2, 1, 1]


def test_every_reward_of_the_package_is_on_the_page() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \| ", page, re.M)) >= set(BUILT_IN)

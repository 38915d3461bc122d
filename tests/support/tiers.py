"""Tier of test parameters: few in the fast tier, the rest in the slow one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def more(values: Iterable[Any]) -> list[Any]:
    return [pytest.param(value, marks=[pytest.mark.slow, pytest.mark.pure]) for value in values]

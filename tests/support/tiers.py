"""In which tier a parameter of a test is played: the fast one has a few, the slow one the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def more(values: Iterable[Any]) -> list[Any]:
    """Parameters that only `make test-full` plays, in the time that others leave (`pure`)."""
    return [pytest.param(one, marks=[pytest.mark.slow, pytest.mark.pure]) for one in values]

"""A long read changes how often the interpreter looks for garbage, and puts it back."""

from __future__ import annotations

import gc

import pytest

from dora_pipe.audit.reading import GARBAGE_MIN, gc_paused
from dora_pipe.core.errors import BusError


def test_collections_are_rare_inside_and_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with gc_paused():
        assert gc.get_threshold() == (GARBAGE_MIN, *before[1:])
        assert gc.isenabled()
    assert gc.get_threshold() == before


def test_collections_are_as_before_when_the_log_cannot_be_read() -> None:
    before = gc.get_threshold()
    with pytest.raises(BusError), gc_paused():
        raise BusError("the broker is gone")
    assert gc.get_threshold() == before

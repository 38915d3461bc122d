"""Spare siblings in simulated runs: nobody is held by who hangs, and both accounts say the same."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.selection import SelectionLine, selection_in
from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import SeedRun
from dora_pipe.sim.world import World


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


def test_audit_and_catalogue_say_the_same_of_who_was_not_waited_for() -> None:
    seed_run, found = SeedRun(draw(4)), list[Any]()
    close = World.close

    def close_read(self: World) -> None:
        found.append(audit(self.bus, self.topics, self.store.root).selection)
        with closing(read_catalogue(self.bus, self.topics)) as tables:
            found.append(selection_in(tables.records("select * from selection")))
        close(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "close", close_read)
        played = seed_run.run()
    assert played.holds, played.line
    audited, told = found
    assert [one.fate for one in audited] == ["trained", "surplus"]
    assert [_figures(one) for one in audited] == [_figures(one) for one in told]
    assert audited[1].siblings > 0 and audited[1].seconds.value is not None


def _figures(line: SelectionLine) -> tuple[Any, ...]:
    """What both must say; seconds are the worker's clock here and the rounds' there."""
    both = (line.tokens, line.reward)
    return (
        line.fate,
        line.siblings,
        *((one.count, pytest.approx(one.value), pytest.approx(one.error)) for one in both),
    )

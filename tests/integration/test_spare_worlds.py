"""Spare trajectories in simulated runs: the catalogue has those that were not waited for."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import pytest

from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import SeedRun
from dora_pipe.sim.world import World


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


def test_the_catalogue_has_samples_that_were_not_waited_for() -> None:
    seed_run, request = SeedRun(draw(4)), list[Any]()
    close = World.close

    def close_read(self: World) -> None:
        with closing(read_catalogue(self.bus, self.topics)) as tables:
            request.extend(tables.records("select * from selection"))
        close(self)

    with pytest.MonkeyPatch.context() as delta:
        delta.setattr(World, "close", close_read)
        played = seed_run.run()
    assert played.holds, played.line
    assert [row["outcome"] for row in request] == ["trained", "redundant"]
    assert request[1]["trajectories"] > 0 and request[1]["seconds"] is not None

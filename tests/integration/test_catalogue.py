"""The catalogue of the recorded run: it and audit's ledger, two accounts of one log, agree."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.bus.bus import Bus
from dora_pipe.ledger.reading import FILE, LivingCatalogue, read_catalogue
from dora_pipe.schemas.topics import Topics
from tests.support.catalogue_stage import differences
from tests.support.recorded_run import STEPS, RecordedRun


def test_both_accounts_of_an_eventful_run_agree(recorded: RecordedRun) -> None:
    with closing(recorded.open()) as bus:
        assert differences(bus, recorded.topics) == []


def test_a_finished_run_is_saved_and_opened_without_its_log(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / FILE
    count = "select count(*) from steps"
    with closing(recorded.open()) as bus:
        with closing(read_catalogue(bus, recorded.topics, path)) as catalogue:
            assert catalogue.one(count) == (STEPS,)
        assert path.is_file()
        monkeypatch.setattr("dora_pipe.ledger.reading.LivingCatalogue", None)
        with closing(read_catalogue(bus, recorded.topics, path)) as opened:
            assert opened.one(count) == (STEPS,)


def test_a_living_catalogue_grows_with_its_log(recorded: RecordedRun) -> None:
    with closing(recorded.open()) as bus:
        shares, groups = [], []
        with closing(_living(bus, recorded.topics)) as living:
            while living.advance():
                living.refresh()
                shares.append(living.follower.share)
                result = living.catalogue.one("select count(*) from groups")
                assert result is not None
                groups.append(result[0])
        living.catalogue.close()
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert groups == sorted(groups)
    assert living.follower.over and not living.follower.unreadable


def _living(bus: Bus, topics: Topics) -> LivingCatalogue:
    return LivingCatalogue(bus, topics)

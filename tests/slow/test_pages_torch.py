"""Commands of the pages that repeat, score or continue a run, on a run of a tiny torch model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.cli_words import parsed
from tests.support.user_run import call, call_here, furnish

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

COMPUTE = frozenset(["replay", "rescore", "mismatch", "retrain", "bisect", "fork", "policy"])
STEPS = 5
TRAJECTORY = "g0000000000-000"


def commands() -> Iterator[tuple[str, ...]]:
    for typed in pages.every_typed():
        for program, *words in typed.commands():
            if Path(program).name != "dora-pipe" or not COMPUTE & {*words[:2]}:
                continue
            run = parsed(words)[1]["run"]
            renamed = ["recorded" if word == run else word for word in words]
            force = ["--force"] if "policy" in words else []
            yield (*within(renamed), *force)


def within(words: list[str]) -> list[str]:
    group, _, _ = TRAJECTORY.partition("-")
    return pages.within(words, group=group, trajectory=TRAJECTORY, last=STEPS - 1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = furnish(tmp_path_factory.mktemp("pages"))
    (directory / "new.py").write_text((directory / "judge.py").read_text())
    short = (
        "run.name=recorded",
        f"run.steps={STEPS}",
        "evaluation.every=1",
        "evaluation.best=true",
    )
    overrides = [word for override in short for word in ("-o", override)]
    assert call(directory, "run", "config.toml", *overrides) == 0, (directory / "said").read_text()
    return directory


@pytest.mark.parametrize("words", sorted({*commands()}), ids=" ".join)
def test_command_of_a_page_runs(words: tuple[str, ...], directory: Path) -> None:
    assert call_here(directory, *words) == 0, (directory / "said").read_text()

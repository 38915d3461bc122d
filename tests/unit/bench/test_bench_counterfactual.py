"""The bench of commands that ask what else could have been: what is compared, and what is left out.

Method: cases that spend what they are told to; one test runs two commands as processes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dora_pipe.bench.counterfactual import (
    CASES,
    BenchedRun,
    Case,
    Spent,
    bench_counterfactual,
    command,
    figure_of,
)
from dora_pipe.core.errors import UsageError
from tests.support.recorded_run import RecordedRun

RUN = BenchedRun(words="demo", folder=Path())


def spent(work: int, cpu_s: float) -> Spent:
    return Spent(work=work, seconds=2 * cpu_s, cpu_s=cpu_s)


def case(name: str, said: list[str]) -> Case:
    def own(run: BenchedRun) -> Spent:
        said.append(f"{name} of {run.words}")
        return spent(10, 4.0)

    def reference(run: BenchedRun) -> Spent:
        said.append(f"beside {name}")
        return spent(20, 1.0)

    return Case(command=name, unit="texts", beside="a loop", own=own, reference=reference)


def test_a_ratio_is_of_the_cpu_time_of_a_unit_within_a_round() -> None:
    rounds = [
        (spent(10, 4.0), spent(20, 1.0)),  # 0.4 s a text beside 0.05 s
        (spent(10, 8.0), spent(20, 4.0)),  # on a machine that was slow just then
        (spent(10, 6.0), spent(20, 1.0)),
    ]
    found = figure_of(case("rescore", []), rounds)
    assert (found.ratio, found.low, found.high) == pytest.approx((8, 4, 12))
    assert (found.units, found.beside_units) == (10, 20)
    assert (found.seconds, found.cpu_s, found.beside_cpu_s) == (12.0, 6.0, 1.0)
    assert found.unit_us == pytest.approx(6e5)


def test_rounds_take_a_command_and_what_stands_beside_it_in_turns() -> None:
    said: list[str] = []
    told: list[str] = []
    (found,) = bench_counterfactual(RUN, [case("diff", said)], 2, told.append)
    assert told == [f"round {one}: diff 8.0 s, 4.0 of CPU; a loop 1.0" for one in (1, 2)]
    assert said == ["beside diff", "diff of demo", "diff of demo", "beside diff"]
    assert found.ratio == pytest.approx(8)


def test_what_the_run_does_not_have_is_named_once_and_left_out() -> None:
    def refused(run: BenchedRun) -> Spent:
        raise UsageError("no trajectory of this run can be continued")

    said: list[str] = []
    cases = [replace(case("fork", []), own=refused), case("diff", [])]
    found = bench_counterfactual(RUN, cases, 3, said.append)
    assert [one.command for one in found] == ["diff"]
    assert said[0] == "without fork: no trajectory of this run can be continued"
    assert not any("fork" in one for one in said[1:])


def test_what_is_made_of_a_run_lies_in_the_benchs_folder_and_not_beside_the_run(
    tmp_path: Path,
) -> None:
    run = tmp_path / "runs" / "demo"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    name, option, root = BenchedRun(words=str(run), folder=tmp_path).linked()
    assert (name, option) == ("demo", "--runs")
    assert Path(root).parent == tmp_path
    assert (Path(root) / name / "config.toml").is_file()
    assert [one.name for one in run.parent.iterdir()] == ["demo"]


@pytest.mark.slow
def test_commands_are_processes_whose_work_is_counted_and_whose_last_words_are_told(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    benched = BenchedRun(words=str(recorded.directory), folder=tmp_path)
    (diff,) = [one for one in CASES if one.command == "diff"]
    (found,) = bench_counterfactual(benched, [diff], 1, [""].append)
    assert found.units > found.beside_units > 200
    assert min(found.cpu_s, found.beside_cpu_s, found.ratio) > 0
    with pytest.raises(UsageError, match=r"dora-pipe show ended with 2: .*no run 'nowhere'"):
        command(["show", "nowhere"], tmp_path)

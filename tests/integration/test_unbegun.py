"""A run that was killed before its first record begins as it was made; one that sampled nothing
leaves its name free; and what a user tells a run is refused at once where it would be later.

Method: the plan of a start is what such a start has left; nothing is started.
"""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.config.load import load_config
from dora_pipe.config.retention import keep_every_of
from dora_pipe.core.errors import ConfigError, SchemaError
from dora_pipe.core.pure.records import Append
from dora_pipe.launch.plan import Plan, plan_new, plan_resume
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.rounds import Round, StopRun
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode

pytest.importorskip("torch")

from tests.support.command_line import caller
from tests.support.models import make_llama_gqa
from tests.support.user_run import furnish

ROOT = Path("runs")
CHILD = ("run.name=child", "model.path=other")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_llama_gqa(tmp_path / "other", scale=3.0)
    return furnish(tmp_path)


def made(*overrides: str, parent: str = "") -> Plan:
    return plan_new(load_config(Path("config.toml"), overrides), ROOT, parent=parent)


def begun(*overrides: str) -> RunStarted:
    plan = made(*overrides)
    with closing(plan.directory.open_bus(plan.config)) as bus, closing(bus.writer()) as writer:
        control = Topics(plan.config.run.name).control
        writer.append([Append(topic=control, value=encode(plan.first))])
    return plan.first


def resumed(run: str, *overrides: str) -> Plan:
    return plan_resume(load_config(ROOT / run, overrides), ROOT, here=True)


def begins_with(first: RunStarted) -> object:
    return first.lineage, first.policy, first.assets_digest


def test_a_run_from_a_version_of_another_one_begins_there_and_not_with_the_model_of_its_file() -> (
    None
):
    mother = begun()
    before, after = made(*CHILD, parent="tiny@0").first, resumed("child").first
    assert before.policy == mother.policy and before.lineage is not None
    assert begins_with(after) == begins_with(before)


def test_a_run_whose_first_record_cannot_be_read_is_refused_and_does_not_begin_anew() -> None:
    plan = made()
    with closing(plan.directory.open_bus(plan.config)) as bus, closing(bus.writer()) as writer:
        writer.append([Append(topic=Topics(plan.config.run.name).control, value=b"\xff damaged")])
    with pytest.raises(SchemaError):
        resumed("tiny")


def test_a_stage_that_does_nothing_is_said_when_a_run_is_made_and_no_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made("trainer.zero_stage=3")
    err = capsys.readouterr().err
    assert "trainer.zero_stage = 3 does nothing with trainer.kind = 'torch'" in err
    resumed("tiny", "trainer.zero_stage=3")
    assert "zero_stage" not in capsys.readouterr().err
    made("run.name=other")
    assert "zero_stage" not in capsys.readouterr().err


def test_what_a_run_keeps_is_decided_when_it_is_made_and_said_where_it_deletes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begun().config["store"]["keep_every"] == 0
    assert "keep_every" not in capsys.readouterr().err
    monkeypatch.setattr("dora_pipe.config.retention.KEPT_ALL_BYTES", 1)
    large = made("run.name=large")
    assert large.first.config["store"]["keep_every"] == 10
    assert "every 10th checkpoint stays" in capsys.readouterr().err
    assert keep_every_of(large.config.store.keep_every, large.first) == 10
    small = resumed("tiny")  # Its file says "auto"; what it began with is in its log.
    assert keep_every_of(small.config.store.keep_every, small.first) == 0


def test_a_run_of_a_model_begins_with_what_that_was_when_the_run_was_made(directory: Path) -> None:
    before = made().first
    shutil.rmtree(directory / "model")
    shutil.copytree(directory / "other", directory / "model")
    assert begins_with(resumed("tiny").first) == begins_with(before)


def test_a_logged_key_is_recorded_and_stored_as_it_is_now_and_a_frozen_one_is_refused() -> None:
    made()
    plan = resumed("tiny", "run.steps=7")
    assert (plan.config.run.steps, plan.first.config["run"]["steps"]) == (7, 7)
    assert plan.directory.config() == plan.config
    with pytest.raises(ConfigError, match=r"cannot change run\.seed"):
        resumed("tiny", "run.seed=5")


def test_topics_that_the_start_has_not_made_are_made() -> None:
    directory = made().directory
    for file in directory.path.glob("log.sqlite*"):
        file.unlink()
    plan = resumed("tiny")
    with closing(directory.open_bus(plan.config)) as bus:
        assert set(Topics("tiny").all()) <= set(bus.topics())


def say(run: str, topic: str, value: bytes) -> None:
    directory = RunDir(ROOT / run)
    with closing(directory.open_bus(directory.config())) as bus, closing(bus.writer()) as writer:
        writer.append([Append(topic=f"{run}.{topic}", value=value)])


def test_a_start_that_has_sampled_nothing_leaves_its_name_free(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = begun()
    assert begun("run.steps=7").at_ns > before.at_ns
    assert "ended before its first trajectory: it starts again" in capsys.readouterr().err
    assert resumed("tiny").first.config["run"]["steps"] == 7
    say("tiny", "trajectories", b"one")
    with pytest.raises(ConfigError, match="run 'tiny' exists"):
        made()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("trainer.learning_rate=abc", r"trainer\.learning_rate: .*float.*str"),
        ("trainer.learning_rate=inf", r"trainer\.learning_rate: a number is not finite"),
        ("rollout.group_size=2", r"set: cannot use 'rollout\.group_size=2'"),
        ("objective.kind=nothing", "nothing"),
        ("staleness.async_batches=0.5", "no batch could fill"),
        ("run.steps=0", r"run\.steps"),
    ],
)
def test_a_change_that_the_run_would_refuse_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    begun()
    call = caller(monkeypatch, capsys)
    code, out, err = call("set", "tiny", words)
    assert (code != 0, out) == (True, "")
    assert re.search(line, err.splitlines()[0]), err
    assert call("set", "tiny", "trainer.learning_rate=0.5")[0] == 0


def test_a_run_that_is_over_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun()
    stop = Round(
        ordinal=0, incarnation=0, now_ns=0, control_next=1, decisions=(StopRun(reason="done"),)
    )
    say("tiny", "decisions", encode(stop))
    call = caller(monkeypatch, capsys)
    for words in (("set", "tiny", "trainer.learning_rate=0.5"), ("control", "pause", "tiny")):
        code, _, err = call(*words)
        assert code == 2 and "run 'tiny' is finished and cannot be changed" in err

"""Tests of checks before a run starts or resumes: no process starts, no file is written."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.analysis import replay
from dora_pipe.config.checks import Problem
from dora_pipe.config.load import load_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import ConfigError, LogTruncated, UsageError
from dora_pipe.launch import plan
from dora_pipe.launch.plan import check_data, check_log, run_started
from dora_pipe.launch.run import refuse_copy
from dora_pipe.launch.run_dir import LOCK, RunDir, locked, refuse_running
from dora_pipe.orchestrator.process.snapshot_files import file_bytes
from dora_pipe.orchestrator.snapshots import body_of
from dora_pipe.orchestrator.state import State
from dora_pipe.store.store import PolicyStore
from tests.support.command_line import Call
from tests.support.device import has_gpu
from tests.support.recorded_run import STEPS, RecordedRun

pytest.importorskip("torch")

from tests.support.user_run import REWARD, TEMPLATE, furnish

NEW_FROM_IT = f"dora-pipe run runs/recorded --from recorded@{STEPS} -o run.name=NEW"
"""What is printed of a run that is over."""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return furnish(tmp_path)


@pytest.fixture
def finished(tmp_path: Path, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    monkeypatch.chdir(tmp_path)
    return recorded.copy(tmp_path / "runs" / "recorded")


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words", "why"),
    [
        ({"model_type": "mamba"}, (), "models of type 'mamba' are not supported"),
        (
            {},
            ("-o", "workers.max_model_len=4096"),
            "fewer than workers.max_model_len = 4096",
        ),
    ],
)
def test_model_that_the_engine_cannot_take_leaves_nothing_behind(
    directory: Path, call: Call, changes: dict[str, object], words: tuple[str, ...], why: str
) -> None:
    change_config(directory, **changes)
    code, _, err = call("run", "config.toml", *words)
    assert (code, why in err) == (9, True), err
    assert not (directory / "runs").exists()


def test_model_without_a_tokenizer_or_with_a_broken_one_leaves_nothing_behind(
    directory: Path, call: Call
) -> None:
    (directory / "model" / "tokenizer.json").write_text("{")
    code, _, err = call("run", "config.toml")
    assert (code, "is not a tokenizer" in err) == (9, True), err
    (directory / "model" / "tokenizer.json").unlink()
    code, _, err = call("run", "config.toml")
    assert (code, "has no tokenizer" in err) == (9, True), err
    assert not (directory / "runs").exists()


@pytest.mark.parametrize("words", [("run", "config.toml"), ("sft", "config.toml", "warm")])
def test_a_tokenizer_larger_than_the_model_is_refused(
    directory: Path, call: Call, words: tuple[str, ...]
) -> None:
    change_config(directory, vocab_size=5)
    code, _, err = call(*words)
    assert (code, "embedding has 5 rows" in err) == (9, True), err
    assert "hint: use the model's own tokenizer" in err
    assert not (directory / "runs").exists() and not (directory / "warm").exists()


CHAT = ("-o", "task.kind=dataset", "-o", "task.chat=true")


def test_an_eval_share_without_a_row_is_refused_where_something_is_evaluated(
    directory: Path, call: Call
) -> None:
    (directory / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    task = ("task.kind=dataset", f"task.data={directory}/rows.jsonl", "task.reward=exact")
    keys = (*task, "task.eval_data=", "task.eval_share=0.01", "evaluation.every=1")
    code, _, err = call("run", "config.toml", *(word for key in keys for word in ("-o", key)))
    assert code == ConfigError.exit_code
    assert "task.eval_share: 0.01 of 1 rows selects no row" in err, err
    assert not (directory / "runs").exists()


def test_a_chat_without_a_template_is_refused(directory: Path, call: Call) -> None:
    code, _, err = call("run", "config.toml", *CHAT)
    assert (code, "messages need a chat template" in err) == (9, True), err
    assert not (directory / "runs").exists()
    (directory / "own.jinja").write_text(TEMPLATE)
    words = (*CHAT, "-o", "model.chat_template=own.jinja", "-o", 'task.tools=["judge:tool"]')
    (directory / "judge.py").write_text(f"{REWARD}\ndef tool(a: int) -> int:\n    'Adds.'\n")
    code, _, err = call("run", "config.toml", *words)
    assert (code, "no parser for" in err) == (3, True), err
    assert not (directory / "runs").exists()


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_trainer_on_a_gpu_that_is_not_there_is_refused(directory: Path, call: Call) -> None:
    code, _, err = call("run", "config.toml", "-o", "trainer.device=cuda")
    assert (code, "torch finds no GPU here" in err) == (3, True), err
    assert not (directory / "runs").exists()


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("modle", "did you mean `model`?"),
        ("modle/deeper", "did you mean `model`?"),
        ("Org/Name-7B", "a model's folder holds config.json, tokenizer.json"),
        (".", "a model's folder holds config.json, tokenizer.json"),
    ],
)
@pytest.mark.parametrize("command", ["run", "sft"])
def test_a_wrong_path_of_a_model_has_a_hint(
    directory: Path, call: Call, command: str, path: str, hint: str
) -> None:
    out = ["warm"] if command == "sft" else []
    code, _, err = call(command, "config.toml", *out, "-o", f"model.path={path}")
    assert (code, hint in err) == (9, True), err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--from", "200"), f"hint: steps 0 to {STEPS - 1} are committed"),
        (("--from", "5", "--to", "2"), "--from 5 must be below --to 2"),
    ],
)
def test_steps_that_are_not_there_are_refused_before_a_trainer_is_opened(
    finished: RecordedRun,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    why: str,
) -> None:
    monkeypatch.setattr(replay, "make_learner", None)
    code, _, err = call("replay", "recorded", *words)
    assert (code, why in err) == (2, True), err


def test_task_that_cannot_be_opened_leaves_no_directory_behind(directory: Path, call: Call) -> None:
    (directory / "judge.py").write_text("scores = 1\n")
    code, _, err = call("run", "config.toml")
    assert code in (3, 10), err
    assert not (directory / "runs").exists()


def test_commits_that_would_not_fit_into_a_record_leave_nothing_behind(
    directory: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(config: Config, manifest_bytes: int) -> Problem:
        asked.append(manifest_bytes)
        return Problem(text="bus.max_record_bytes: a commit is too large", hint="smaller batches")

    monkeypatch.setattr(plan, "commit_problem", refuse)
    code, _, err = call("run", "config.toml")
    assert (code, "a commit is too large" in err, "smaller batches" in err) == (3, True, True), err
    assert not (directory / "runs").exists()
    assert asked[0] > 1000, "the names of the model's tensors were counted"


def test_a_finished_run_is_not_changed_and_the_hint_says_how_to_go_on(
    finished: RecordedRun, call: Call
) -> None:
    before = (finished.directory / "config.toml").read_bytes()
    code, _, err = call("run", "runs/recorded", "--resume", "-o", "run.steps=99")
    assert code == 2
    assert "'recorded' is finished" in err and NEW_FROM_IT in err
    assert (finished.directory / "config.toml").read_bytes() == before


def test_a_finished_run_that_is_resumed_says_that_it_is_over_and_starts_nothing(
    finished: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.launch.run.supervise", None)
    before = (finished.directory / "config.toml").read_bytes()
    code, _, err = call("run", "runs/recorded", "--resume")
    assert (code, err.count("\n")) == (0, 1), err
    assert "run 'recorded' is finished" in err and NEW_FROM_IT in err
    assert (finished.directory / "config.toml").read_bytes() == before
    assert not (finished.directory / "logs").exists()


def test_a_copy_under_another_name_is_not_resumed_as_the_run_it_was_made_of(
    finished: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = finished.directory.parent
    monkeypatch.setattr("dora_pipe.launch.run.supervise", None)
    finished.copy(runs / "cut")
    for words in ((), ("-o", "run.name=cut")):
        code, _, err = call("run", "runs/cut", "--resume", *words)
        assert (code, err.count("\n")) == (3, 2), err
        assert "runs/cut holds run 'recorded', not 'cut'" in err
        assert "dora-pipe run runs/recorded --resume" in err and "FOLDER/recorded" in err
    finished.copy(runs.parent / "copies" / "recorded")
    assert call("run", "copies/recorded", "--resume", "--runs", "copies")[0] == 0
    monkeypatch.chdir(finished.directory)
    assert call("run", ".", "--resume", "--runs", "..")[0] == 0


def test_a_folder_that_a_run_was_configured_in_may_have_any_name(
    directory: Path, finished: RecordedRun
) -> None:
    folder = directory / "mine"
    folder.mkdir()
    shutil.copy(finished.directory / "config.toml", folder)
    refuse_copy(RunDir(folder), finished.directory.parent)
    assert load_config(folder, ()).run.name == "recorded"


def test_a_living_run_is_not_resumed_beside_itself(finished: RecordedRun, call: Call) -> None:
    with locked(RunDir(finished.directory)):
        code, _, err = call("run", "runs/recorded", "--resume")
        assert (code, f"is already running (process {os.getpid()})" in err) == (2, True), err
        code, _, err = call("trainer", "runs/recorded")
        assert (code, "is already running" in err) == (2, True), err
    refuse_running(RunDir(finished.directory))


def test_roles_started_one_by_one_share_a_run_that_run_must_not_take(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    with (
        locked(directory, shared=True),
        locked(directory, shared=True),
        pytest.raises(UsageError, match=r"is already running$"),
    ):
        refuse_running(directory)


def test_the_lock_is_gone_with_its_holder_however_it_died(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with locked(directory):
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            os.write(tell, b"x")
            signal.pause()
        os._exit(1)
    assert os.read(ready, 1) == b"x"
    with pytest.raises(UsageError, match=f"process {pid}"):
        refuse_running(directory)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    refuse_running(directory)
    os.close(ready)
    os.close(tell)


def test_a_file_system_without_locks_is_run_on_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(RunDir(tmp_path)), locked(RunDir(tmp_path)):
        assert (tmp_path / LOCK).is_file()


def plant_versions(store: Path, count: int) -> None:
    for number in range(count):
        path = store / "weights" / f"{number:064}.safetensors"
        path.write_bytes(bytes(16))


def test_a_log_that_names_what_lies_in_the_store_is_whole(finished: RecordedRun) -> None:
    with closing(finished.open()) as bus:
        check_log(RunDir(finished.directory), RunDir(finished.directory).config(), bus)


def test_a_log_that_lost_its_end_is_not_gone_on_with(finished: RecordedRun, call: Call) -> None:
    plant_versions(finished.store, 3)  # two trainers were started: two are allowed
    code, _, err = call("run", "runs/recorded", "--resume")
    assert code == LogTruncated.exit_code
    assert "is incomplete: 3 versions of the store are not in the log" in err
    assert "-wal" in err


def test_a_log_that_lost_everything_does_not_start_anew(finished: RecordedRun, call: Call) -> None:
    finished.log.write_bytes(b"")
    code, _, err = call("run", "runs/recorded", "--resume")
    assert (code, "is incomplete" in err) == (LogTruncated.exit_code, True), err
    assert finished.log.read_bytes() == b""


def test_what_a_killed_trainer_left_is_no_sign_of_a_loss(finished: RecordedRun) -> None:
    plant_versions(finished.store, 2)
    with closing(finished.open()) as bus:
        check_log(RunDir(finished.directory), RunDir(finished.directory).config(), bus)


def test_a_snapshot_of_a_round_that_is_gone_shows_a_lost_end(finished: RecordedRun) -> None:
    directory, state = RunDir(finished.directory), State()
    name, content = file_bytes(body_of(state), run="recorded", offset=10**6, digest=state.digest())
    directory.snapshots.mkdir(exist_ok=True)
    (directory.snapshots / name).write_bytes(content)
    with (
        closing(finished.open()) as bus,
        pytest.raises(LogTruncated, match="decisions offset 1000000"),
    ):
        check_log(directory, directory.config(), bus)


def test_data_that_were_changed_are_named_before_a_run_goes_on(directory: Path) -> None:
    config = load_config(directory / "config.toml", ())
    first = run_started(config, PolicyStore(directory / "store"))
    check_data(config, first)
    with (directory / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "say z: ", "answer": "z"}) + "\n")
    with pytest.raises(ConfigError, match="the training data changed") as refused:
        check_data(config, first)
    assert "--from" in (refused.value.hint or "")

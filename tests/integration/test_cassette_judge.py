"""The reward `judge` that a cassette answers: without its endpoint and its key.

Method: a stand-in for the endpoint, which is gone in strict runs; the reward by itself, and at the
end through a task process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.rewards import bounded
from dora_pipe.producers.rewards.arguments import RewardContext
from dora_pipe.producers.rewards.judge import Judge, JudgeClient
from dora_pipe.producers.tasks.calls import RewardCall, Rewarded, TaskFailed
from dora_pipe.producers.tasks.cassette import REWARD, CassetteMiss
from dora_pipe.producers.tasks.cassette_file import CassetteFile
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.port import Reward
from dora_pipe.producers.tasks.tape import CASSETTE, TAPE, Cassette, EpisodeTape, Mode
from tests.support.data_files import write_jsonl
from tests.support.judge_endpoint import Answer, Endpoint, judge_endpoint, said

PROMPT = "Is {{ text }} the answer to {{ row.question }}? Say `Score: n`, from 0 to 10."
ROW = {"question": "6 * 7"}
AWAY = Endpoint(lambda number, prompt: said(""), url="http://127.0.0.1:9/v1")
KEY = "THE_KEY_OF_A_JUDGE"


@pytest.fixture(autouse=True)
def helper() -> Iterator[None]:
    yield
    bounded.HELPER.close()


def more_each_time() -> Any:
    """A judge that likes every text better than the one before it."""
    scores = itertools.count(1)
    return lambda number, prompt: said(f"Score: {next(scores)}")


def judged(
    folder: Path, endpoint: Endpoint, mode: Mode, run: str, text: str = "42", **options: Any
) -> tuple[Reward, EpisodeTape]:
    """What the reward gives in a task process with this cassette; the tape of its trajectory."""
    file = CassetteFile(folder / "c.jsonl", writes=mode != "strict")
    cassette = Cassette(file=file, mode=mode, run=run)
    tape = EpisodeTape(cassette, ROW, by="g-001", where="row 0 of train")
    tape.add({"kind": REWARD, "text": text})
    given = {"model": "m", "url": endpoint.url, "prompt": PROMPT, "range": (0.0, 10.0), **options}
    before = CASSETTE.set(cassette), TAPE.set(tape)
    try:
        kept = RewardContext(directory=str(folder))
        client = JudgeClient(Judge(cache="kept", **given), "here", kept)
        found = asyncio.run(client.score(ROW, text, (), ()))
        client.close()
        return found, tape
    finally:
        CASSETTE.reset(before[0])
        TAPE.reset(before[1])


def test_a_strict_run_needs_neither_endpoint_nor_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "secret")
    with judge_endpoint(more_each_time()) as endpoint:
        first, asked = judged(tmp_path, endpoint, "record", "one", key_env=KEY)
        assert endpoint.keys == ["Bearer secret"]
    monkeypatch.delenv(KEY)
    again, given = judged(tmp_path, AWAY, "strict", "two", key_env=KEY)
    assert again == first
    assert first.value == 0.1
    assert (asked.use.answers, asked.use.asked) == (0, 1)
    assert (given.use.answers, given.use.asked) == (1, 0)
    assert "secret" not in (tmp_path / "c.jsonl").read_text()


def test_without_a_strict_cassette_a_key_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the environment variable {KEY} is not set"):
        judged(tmp_path, AWAY, "record", "one", key_env=KEY)


def test_what_the_judge_was_never_asked_is_refused_by_its_name(tmp_path: Path) -> None:
    with judge_endpoint(more_each_time()) as endpoint:
        judged(tmp_path, endpoint, "record", "one")
    with pytest.raises(CassetteMiss, match=r"row 0 of train: judge\(.* is not on c\.jsonl"):
        judged(tmp_path, AWAY, "strict", "two", text="43")


def test_refresh_asks_the_endpoint_again_whatever_is_kept(tmp_path: Path) -> None:
    with judge_endpoint(more_each_time()) as endpoint:
        for mode, run in (("record", "one"), ("record", "two"), ("refresh", "three")):
            judged(tmp_path, endpoint, mode, run)  # type: ignore[arg-type]
        assert len(endpoint.asked) == 2
    assert judged(tmp_path, AWAY, "strict", "four")[0].value == 0.2


def test_a_refusal_is_not_recorded(tmp_path: Path) -> None:
    def refuses(number: int, prompt: str) -> Answer:
        return 401, b"who are you"

    with judge_endpoint(refuses) as endpoint, pytest.raises(TaskError, match="refuses with 401"):
        judged(tmp_path, endpoint, "record", "one")
    assert (tmp_path / "c.jsonl").read_bytes() == b""


def test_an_answer_in_which_no_score_is_found_any_more_is_said_to_be_the_cassettes(
    tmp_path: Path,
) -> None:
    with judge_endpoint(more_each_time()) as endpoint:
        judged(tmp_path, endpoint, "record", "one")
    with pytest.raises(TaskError, match=r"on the cassette: the judge gave no score from 0 to 0\.5"):
        judged(tmp_path, AWAY, "strict", "two", range=(0.0, 0.5))


@pytest.mark.slow
def test_a_task_process_scores_from_its_cassette_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "6 * 7", "question": "6 * 7", "answer": "42"}])

    def scored(url: str, mode: Any, run: str, text: str) -> Rewarded | TaskFailed:
        options = {"model": "m", "url": url, "prompt": PROMPT, "range": [0, 10], "key_env": KEY}
        task = model.Task(
            kind="dataset",
            directory=str(tmp_path),
            data=str(tmp_path / "rows.jsonl"),
            rewards=(model.RewardUse(use="judge", options={**options, "cache": run}),),
            cassette=str(tmp_path / "c.jsonl"),
            cassette_mode=mode,
        )
        with TaskPool(task, run=run) as pool:
            pool.submit(RewardCall(request="g-1/1", split="train", index=0, text=text, turns=()))
            while not (events := pool.poll(0.2)):
                pass
        assert isinstance(events[0], Rewarded | TaskFailed)
        return events[0]

    monkeypatch.setenv(KEY, "secret")
    with judge_endpoint(more_each_time()) as endpoint:
        first = scored(endpoint.url, "record", "one", "42")
    monkeypatch.delenv(KEY)
    again = scored(AWAY.url, "strict", "two", "42")
    missed = scored(AWAY.url, "strict", "three", "43")
    assert isinstance(first, Rewarded)
    assert isinstance(again, Rewarded)
    assert again.cassette is not None
    assert (again.cassette.answers, again.cassette.asked) == (1, 0)
    assert msgspec.structs.replace(again, cassette=first.cassette) == first
    assert isinstance(missed, TaskFailed)
    assert missed.error == "CassetteMiss"

"""Tests of the reward `judge` against a fake endpoint: requests, scores, retries, the cache."""

from __future__ import annotations

import asyncio
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.rewards import bounded
from dora_pipe.producers.rewards.arguments import RewardContext
from dora_pipe.producers.rewards.judge import Judge, JudgeClient
from dora_pipe.producers.rewards.registry import Rewards
from dora_pipe.producers.tasks.calls import Rewarded, TaskFailed
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.registry import open_task, reward_digest
from dora_pipe.producers.tasks.task import Retry, Reward
from tests.support.judge_endpoint import Answer, Endpoint, completion, judge_endpoint
from tests.support.task_pool import score

PROMPT = "Is {{ text }} the answer to {{ row.question }}? Say `Score: n`, from 0 to 10."
ROW = {"question": "6 * 7", "prompt": "6 * 7"}

PIECES = 1200
"""Pieces of an answer that drips: 60 s."""

Ask = Callable[[str], Reward]


async def samples(client: JudgeClient) -> list[Reward]:
    return await asyncio.gather(*(client.score(ROW, "42", (), ()) for _ in range(8)))


@pytest.fixture
def client_of(tmp_path: Path) -> Iterator[Callable[..., JudgeClient]]:
    opened: list[JudgeClient] = []

    def made(endpoint: Endpoint, **options: Any) -> JudgeClient:
        given: dict[str, Any] = {
            **{"model": "m", "url": endpoint.url, "prompt": PROMPT, "cache": "kept"},
            **{"range": (0.0, 10.0)},
            **options,
        }
        opened.append(JudgeClient(Judge(**given), "here", RewardContext(directory=str(tmp_path))))
        return opened[-1]

    yield made
    for client in opened:
        client.close()
    bounded.HELPER.close()


@pytest.fixture
def ask(client_of: Callable[..., JudgeClient]) -> Callable[..., Ask]:
    def judging(endpoint: Endpoint, **options: Any) -> Ask:
        client = client_of(endpoint, **options)
        return lambda text: asyncio.run(client.score(ROW, text, (), ()))

    return judging


def always(text: str) -> Callable[[int, str], Answer]:
    return lambda number, prompt: completion(text)


def test_the_template_is_asked_at_temperature_0_and_the_score_is_from_0_to_1(
    ask: Callable[..., Ask],
) -> None:
    with judge_endpoint(always("It is. Score: 7")) as endpoint:
        result = ask(endpoint, system="You judge.", body={"seed": 1})("42")
    assert result == Reward(value=0.7, parts={"prompt_tokens": 100.0, "completion_tokens": 10.0})
    assert endpoint.asked == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "You judge."},
                {
                    "role": "user",
                    "content": "Is 42 the answer to 6 * 7? Say `Score: n`, from 0 to 10.",
                },
            ],
            "temperature": 0,
            "max_tokens": 512,
            "seed": 1,
        }
    ]


def test_null_is_no_text_of_the_prompt(client_of: Callable[..., JudgeClient]) -> None:
    with judge_endpoint(always("Score: 7")) as endpoint:
        client = client_of(endpoint, prompt="{{ row.hint }}", prompt_file="")
        with pytest.raises(TaskError, match="a value in the judge's prompt is null"):
            asyncio.run(client.score({"hint": None}, "42", (), ()))
    assert endpoint.asked == []


@pytest.mark.parametrize(
    ("answer", "options", "value"),
    [
        ("**Score:** 10", {}, 1.0),
        ("score = 2, no: score = 3.5", {}, 0.35),
        ("[[4]]", {"pattern": r"\[\[(\d+)\]\]"}, 0.4),
        ('```json\n{"score": "5", "more": {"a": 1}}\n```', {}, 0.5),
        ("Score: -1", {"range": (-2.0, 0.0), "max_tokens": 0, "body": {"temperature": 1}}, 0.5),
    ],
)
def test_a_score_is_found_in_the_answer(
    ask: Callable[..., Ask], answer: str, options: dict[str, Any], value: float
) -> None:
    with judge_endpoint(always(answer)) as endpoint:
        assert ask(endpoint, **options)("42").value == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (completion("I cannot say."), "the judge gave no score from 0 to 10: I cannot say."),
        (completion("Score: 11"), "the judge gave no score from 0 to 10: Score: 11"),
        ((200, b"<html>"), "the judge's answer is not a chat completion"),
        ((200, b'{"choices": []}'), "the judge's answer is not a chat completion"),
        ((429, b"slow down"), "says 429: slow down"),
        ((503, b""), "says 503"),
        ((200, b" " * (5 << 20)), "is too long"),
    ],
)
def test_what_another_time_may_be_better_is_asked_again_and_not_kept(
    ask: Callable[..., Ask], tmp_path: Path, answer: Answer, message: str
) -> None:
    with judge_endpoint(lambda number, prompt: answer) as endpoint:
        for _ in range(2):
            with pytest.raises(Retry, match=message):
                ask(endpoint)("42")
    assert len(endpoint.asked) == 2
    assert not list(tmp_path.rglob("*.json"))


def test_an_answer_that_drips_is_given_up_at_the_limit(ask: Callable[..., Ask]) -> None:
    hung_up: Future[bool] = Future()

    class Drip(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            for _ in range(PIECES):
                self.wfile.write(b" ")
                if select.select([self.connection], [], [], 0.05)[0]:
                    break
            hung_up.set_result(bool(select.select([self.connection], [], [], 0)[0]))

        def log_message(self, format: str, *args: Any) -> None:
            """Discard log lines."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Drip) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = Endpoint(always("Score: 1"), url=f"http://127.0.0.1:{server.server_port}/v1")
        with pytest.raises(Retry, match=r"did not answer completely within 3 s"):
            ask(endpoint, timeout_s=3.0)("42")
        assert hung_up.result(60)
        server.shutdown()


def test_an_endpoint_that_is_late_or_away_is_asked_again(ask: Callable[..., Ask]) -> None:
    late = judge_endpoint(always("Score: 1"), delay_s=1.0)
    with late as endpoint, pytest.raises(Retry, match="answer"):
        ask(endpoint, timeout_s=0.2)("42")
    with pytest.raises(Retry, match="answer"):
        ask(endpoint)("42")


def test_a_key_comes_from_the_environment_and_is_never_said(
    ask: Callable[..., Ask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    refusing = judge_endpoint(lambda number, prompt: (401, b"wrong key sk-secret"))
    refused = pytest.raises(TaskError, match=r"answered 401: wrong key \.\.\.")
    with refusing as endpoint, refused as caught:
        ask(endpoint, key_env="JUDGE_KEY")("42")
    assert "secret" not in str(caught.value)
    assert endpoint.keys == ["Bearer sk-secret"]


def test_samples_that_say_the_same_at_the_same_time_are_asked_about_once(
    client_of: Callable[..., JudgeClient],
) -> None:
    numbered = judge_endpoint(lambda number, prompt: completion(f"Score: {number}"), delay_s=0.2)
    with numbered as endpoint:
        result = asyncio.run(samples(client_of(endpoint)))
    assert [record.value for record in result] == [0.0] * 8
    assert len(endpoint.asked) == 1


def test_the_same_question_has_one_answer_and_one_cost(ask: Callable[..., Ask]) -> None:
    with judge_endpoint(lambda number, prompt: completion(f"Score: {number}")) as endpoint:
        first = ask(endpoint)("42")
        again = ask(endpoint)("42")
        other = ask(endpoint)("43")
    assert (first, first.value, other.value) == (again, 0.0, 0.1)
    assert len(endpoint.asked) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, "needs one of the options `url` and `url_env`"),
        ({"url": "", "url_env": "NO_SUCH"}, "the environment variable NO_SUCH is not set"),
        ({"url": "http://a:b@c/v1"}, "no credentials in an address"),
        ({"key_env": "NO_SUCH"}, "the environment variable NO_SUCH is not set"),
        ({"prompt": ""}, "needs one of the options `prompt` and `prompt_file`"),
        ({"prompt": "{% if %}"}, "prompt, line 1: Expected an expression"),
        ({"prompt": "", "prompt_file": "no.txt"}, "prompt_file: .*No such file"),
        ({"pattern": "score"}, "pattern: it needs a group"),
        ({"range": [1.0, 1.0]}, "range: 1 is not below 1"),
        ({"timeout_s": 10.0}, "timeout_s is 10, and task.reward_timeout_s 10"),
    ],
)
def test_options_that_cannot_be_are_one_line(options: dict[str, Any], message: str) -> None:
    given = {"model": "m", "url": "http://127.0.0.1:9/v1", "prompt": PROMPT, **options}
    with pytest.raises(ConfigError, match=message):
        Rewards([model.RewardUse(use="judge", options=given)]).sources()


def _task(tmp_path: Path, url: str, **keys: Any) -> model.Task:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "6 * 7", "question": "6 * 7"}\n')
    (tmp_path / "rubric.txt").write_text(PROMPT)
    options = {
        **{"model": "m", "url": url, "prompt_file": "rubric.txt", "cache": "kept"},
        **{"range": [0.0, 10.0]},
    }
    return model.Task(
        kind="dataset",
        data=str(tmp_path / "rows.jsonl"),
        directory=str(tmp_path),
        reward=(
            model.RewardUse(use="judge", options=options),
            model.RewardUse(use="regex", weight=0.5, options={"pattern": "4"}),
        ),
        **keys,
    )


def test_the_rubric_is_digested(tmp_path: Path) -> None:
    config = _task(tmp_path, "http://127.0.0.1:9/v1")
    before = reward_digest(open_task(config))
    (tmp_path / "rubric.txt").write_text(PROMPT + " Be strict.")
    assert before != reward_digest(open_task(config)) != ""


def _scored(pool: TaskPool, texts: list[str]) -> dict[str, Rewarded | TaskFailed]:
    for index, text in enumerate(texts):
        pool.submit(score(f"r{index}", text))
    results: dict[str, Rewarded | TaskFailed] = {}
    end = time.monotonic() + 60
    while len(results) < len(texts) and time.monotonic() < end:
        for event in pool.poll(wait_s=0.1):
            assert isinstance(event, Rewarded | TaskFailed), event
            results[event.request] = event
    return results


def test_sixty_four_slow_answers_come_together_through_one_process(tmp_path: Path) -> None:
    slow = judge_endpoint(always("Score: 4"), delay_s=2.0)
    with slow as endpoint, TaskPool(_task(tmp_path, endpoint.url)) as pool:
        pool.wait()
        began = time.monotonic()
        result = _scored(pool, [f"4{index}" for index in range(64)])
        took = time.monotonic() - began
    parts = {
        **{"judge": 0.4, "judge.prompt_tokens": 100.0, "judge.completion_tokens": 10.0},
        "regex": 1.0,
    }
    expected = {
        f"r{index}": Rewarded(request=f"r{index}", reward=0.9, raw=0.4, parts=parts)
        for index in range(64)
    }
    assert result == expected
    assert endpoint.most > 32
    assert took < 100.0  # One after the other would be 128 s.


def test_a_judge_that_is_busy_at_first_is_asked_again_and_one_that_never_answers_is_named(
    tmp_path: Path,
) -> None:
    def busy(number: int, prompt: str) -> Answer:
        return (429, b"busy") if number < 2 or "43" in prompt else completion("Score: 10")

    stand_in = judge_endpoint(busy)
    with stand_in as endpoint, TaskPool(_task(tmp_path, endpoint.url)) as pool:
        pool.wait()
        result = _scored(pool, ["42"]) | {"never": _scored(pool, ["43"])["r0"]}
    assert isinstance(result["r0"], Rewarded)
    assert isinstance(result["never"], TaskFailed)
    assert result["never"].error == "Retry"
    assert f"the judge at {endpoint.url}" in result["never"].message

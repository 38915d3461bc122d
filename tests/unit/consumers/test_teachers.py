"""Tests of teachers: values, endpoint requests, retries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.torch.teacher import ModelOptions, ModelTeacher
from dora_pipe.consumers.teachers import endpoint as asking
from dora_pipe.consumers.teachers.endpoint import EndpointOptions, EndpointTeacher
from dora_pipe.consumers.teachers.registry import open_teacher, with_digest
from dora_pipe.consumers.teachers.teacher import Row, Scores, Teacher
from dora_pipe.core.errors import ConfigError, DoraError, NonFinite, PolicyError, ResourceError
from dora_pipe.store.model_dir import import_model, weights_digest
from dora_pipe.store.store import PolicyStore
from tests.support.configs import plain_config
from tests.support.judge_endpoint import judge_endpoint
from tests.support.models import make_llama_gqa, make_qwen2
from tests.support.teachers import own_logprobs, teacher_endpoint

ROWS: list[Row] = [
    ([5, 9, 7, 30, 2], [0, 0, 1, 1, 1]),
    ([8] * 40, [0] * 20 + [1, 0] * 10),
    ([4, 6], [0, 0]),
    ([11, 12, 13], [1, 1, 1]),
]
OPTIONS = EndpointOptions(model="big", batch=1, concurrency=2, timeout_s=5.0, retries_max=2)


def rows_of(scores: Scores) -> list[list[float]]:
    while True:
        try:
            next(scores)
        except StopIteration as ended:
            value: list[list[float]] = ended.value
            return value


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama_gqa(tmp_path_factory.mktemp("teacher") / "model", scale=3.0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PAUSE_S", 0.01)


def expected(directory: Path, temperature: float = 1.0) -> list[list[float]]:
    results = []
    for ids, mask in ROWS:
        logprobs = own_logprobs(directory, ids, temperature)
        results.append([logprobs[index - 1] for index in range(1, len(ids)) if mask[index]])
    return results


# A directory


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tokens", [4, 64, 16384])
def test_directory_says_the_log_softmax_of_its_logits_however_it_is_packed(
    directory: Path, temperature: float, tokens: int
) -> None:
    options = ModelOptions(temperature=temperature, padded_tokens_max=tokens)
    rows = rows_of(ModelTeacher(directory, digest="", options=options).logprobs(ROWS))
    for row, own in zip(rows, expected(directory, temperature), strict=True):
        assert row == pytest.approx(own, abs=2e-5)
        assert [float(np.float32(entry)) for entry in row] == row


def test_directory_is_named_by_its_weights_and_others_are_refused(
    directory: Path, tmp_path: Path
) -> None:
    stored = import_model(PolicyStore(tmp_path / "store"), directory)[0].digest
    assert weights_digest(directory) == stored
    teacher = ModelTeacher(directory, digest=stored, options=ModelOptions())
    assert teacher.repeatable and teacher.name() == f"float32 {stored}"
    with pytest.raises(PolicyError, match=f"digest {stored[:12]}, those of the run's teacher fff"):
        ModelTeacher(directory, digest="f" * 64, options=ModelOptions())


def test_token_that_a_directory_does_not_know_is_named(directory: Path) -> None:
    teacher = ModelTeacher(directory, digest="", options=ModelOptions())
    with pytest.raises(PolicyError, match="has no token 777: it has 259"):
        rows_of(teacher.logprobs([([1, 777], [0, 1])]))


def config_of(**teacher: Any) -> Config:
    workers = {"max_model_len": 64}
    plain = plain_config(teacher=teacher, objective={"kind": "distill"}, workers=workers)
    return msgspec.convert(plain, Config)


def test_teacher_of_a_run_that_starts_has_the_tokens_of_its_policy(
    directory: Path, tmp_path: Path
) -> None:
    config = config_of(path=str(directory))
    digest = with_digest(config, directory)
    assert digest.teacher.digest == weights_digest(directory)
    assert isinstance(open_teacher(digest, directory, "cpu"), ModelTeacher)
    other = make_qwen2(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"token 1 of the policy is '<bos>', and .* has no such"):
        with_digest(config, other)
    with pytest.raises(ConfigError, match="token 1 of the policy is '<bos>'"):
        open_teacher(digest, other, "cpu")
    (other / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        with_digest(config, other)
    short = make_llama_gqa(tmp_path / "short", context_tokens=32)
    with pytest.raises(ConfigError, match="32 positions, fewer than a context of 64"):
        with_digest(config_of(path=str(short)), directory)
    with pytest.raises(ConfigError, match=r"teacher.digest"):
        with_digest(config_of(path=str(directory), digest="f" * 64), directory)
    assert open_teacher(config_of(url="http://h", model="m"), other, "") is not None


# An endpoint


@pytest.fixture
def teacher(directory: Path) -> Iterator[Teacher]:
    with teacher_endpoint(directory) as there:
        yield EndpointTeacher(there.url, OPTIONS)


def test_endpoint_says_what_the_directory_says(directory: Path, teacher: Teacher) -> None:
    rows = rows_of(teacher.logprobs(ROWS))
    for row, own in zip(rows, expected(directory), strict=True):
        assert row == pytest.approx(own, abs=2e-5)
        assert [float(np.float32(entry)) for entry in row] == row
    assert rows_of(teacher.logprobs([])) == []
    assert not teacher.repeatable and teacher.name() == "endpoint big"


def test_requests_are_made_again_and_it_is_said_how_many_are_open(directory: Path) -> None:
    with teacher_endpoint(directory, fails=2, delay_s=0.3) as there:
        teacher = EndpointTeacher(there.url, OPTIONS, key="secret")
        scores, words = teacher.logprobs(ROWS), set()
        while True:
            try:
                next(scores)
            except StopIteration as ended:
                assert [len(row) for row in ended.value] == [3, 10, 0, 2]
                break
            words.add(teacher.waits_for)
        assert words <= {f"the teacher at {there.url}: {n} of 4 requests open" for n in range(1, 5)}
        assert len(words) > 1 and teacher.waits_for == ""
        assert len(there.asked) == 6 and there.most == OPTIONS.concurrency
        assert set(there.keys) == {"Bearer secret"}
        body = there.asked[-1]
        assert body | {"prompt": 0} == {
            "model": "big",
            "prompt": 0,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }


def answer(observed: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "prompt_logprobs": observed}]}).encode()


@pytest.mark.parametrize(
    ("status", "body", "error", "words", "asked"),
    [
        (
            503,
            b"busy with secret",
            ResourceError,
            r"says 503: busy with \.\.\. \(asked 3 times\)",
            3,
        ),
        (400, b"too long", ResourceError, "answered 400: too long", 1),
        (200, b"{}", ResourceError, "is not a completion", 1),
        (200, answer(None), ResourceError, "returned no log-probs of the prompt", 1),
        (200, answer([None]), ResourceError, "returned no log-probs of the prompt", 1),
        (200, answer([None, {"8": {"logprob": -1}}]), ResourceError, "no log-prob of token 9", 1),
        (200, answer([None, None]), ResourceError, "no log-prob of token 9", 1),
        (200, answer([None, {"9": {"logprob": -1e99}}]), NonFinite, "log-prob for token 9: -1e", 1),
    ],
)
def test_endpoint_that_does_not_say_it_ends_the_step_with_one_line(
    status: int, body: bytes, error: type[DoraError], words: str, asked: int
) -> None:
    with judge_endpoint(lambda number, _: (status, body), asked=lambda body: body) as there:
        teacher = EndpointTeacher(there.url, OPTIONS, key="secret")
        with pytest.raises(error, match=words) as ended:
            rows_of(teacher.logprobs([([1, 9], [0, 1])]))
        assert len(there.asked) == asked
        assert ended.value.waited_out == (status == 503)
        assert teacher.waits_for == ""
    if status == 503:
        removed_teacher = EndpointTeacher(there.url, OPTIONS)
        with pytest.raises(ResourceError, match="does not answer"):
            rows_of(removed_teacher.logprobs([([1, 9], [0, 1])]))

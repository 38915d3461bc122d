"""Tests of the vLLM engine against a fake server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dora_pipe.core.errors import ConfigError, InvariantBroken, PolicyError, ResourceError
from dora_pipe.producers.engines.engine import (
    UNASSIGNED_LEFT_OUT,
    EngineEvent,
    PromptTokens,
    RequestFinished,
    SamplingParams,
    TokensSampled,
)
from dora_pipe.producers.engines.vllm import server as vllm_server
from dora_pipe.producers.engines.vllm import wire
from dora_pipe.producers.engines.vllm.http import Address
from dora_pipe.producers.engines.vllm.server import VllmEngine
from dora_pipe.schemas.routes import Routes
from dora_pipe.store.model_dir import WEIGHTS, weights_digest
from tests.support.engine_contract import Decode, Result, Subject, byte_decode, request, run, take
from tests.support.engine_moves import CHECKS
from tests.support.engine_routes import routed_run
from tests.support.fake_vllm_server import VOCABULARY, FakeVllm, experts
from tests.support.models import make_qwen2

OF_A_MODEL = "logprobs_are_at_the_temperature_asked_for"
"""The fake server has no logits."""


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    fake = FakeVllm()
    yield fake
    fake.close()


@pytest.fixture
def subject(server: FakeVllm, tmp_path: Path) -> Iterator[Subject]:
    opened: list[VllmEngine] = []
    for name in "ab":
        (tmp_path / name).write_text(name * 64)
    first, second = ((tmp_path / name, name * 64) for name in "ab")

    def open_engine(
        *, slots: int, context_tokens: int = 256, decode: Decode | None = None
    ) -> VllmEngine:
        engine = VllmEngine(
            tmp_path,
            slots=slots,
            context_tokens=context_tokens,
            address=Address.of(server.url, server.key),
            decode=decode,
            sleep=True,
        )
        engine.load(first[0], version=0, digest=first[1])
        opened.append(engine)
        return engine

    policies = (first, second)
    yield Subject(
        name="fake", open=open_engine, vocabulary=VOCABULARY, policies=policies, ahead=True
    )
    for engine in opened:
        engine.close()


def _open(subject: Subject, slots: int = 4) -> VllmEngine:
    engine = subject.open(slots=slots)
    assert isinstance(engine, VllmEngine)
    return engine


def _until(engine: VllmEngine, name: str) -> RequestFinished:
    for _ in range(1000):
        for event in engine.step():
            if isinstance(event, RequestFinished) and event.request == name:
                return event
    raise AssertionError(f"{name} does not end")


@pytest.mark.parametrize("check", [name for name in CHECKS if name != OF_A_MODEL])
def test_engine_of_a_server_keeps_the_contract(
    server: FakeVllm, subject: Subject, check: str
) -> None:
    server.chunk_s = 0.001
    CHECKS[check](subject)


def test_blocks_that_requests_share_are_counted_once(server: FakeVllm, subject: Subject) -> None:
    engine, expected = _open(subject), 4 * 70 - 2 * 64
    server.hold_after = {7: 1}
    for name, first in (("a", 7), ("b", 7), ("c", 7), ("d", 8)):
        engine.add(request(name, [first, *[7] * 69], max_tokens=30))
    for _ in range(100):  # until each has its first token
        engine.step()
        if engine.kv_used_tokens == expected:
            break
    server.release.set()
    assert engine.kv_used_tokens == expected, "a, b and c share whole blocks of 64 tokens"


def test_server_is_told_which_ids_have_no_token(
    server: FakeVllm, subject: Subject, tmp_path: Path
) -> None:
    assert UNASSIGNED_LEFT_OUT not in _open(subject).declares
    assert server.opened == ["", "[]"]
    Tokenizer(WordLevel({"a": 0, "b": 2}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    assert UNASSIGNED_LEFT_OUT in _open(subject).declares
    assert server.opened == ["", "[1,3,4]"]


def test_request_names_all_that_decides_its_tokens(server: FakeVllm, subject: Subject) -> None:
    engine = _open(subject)
    engine.add(request("r", [5, 6], seed=2**64 - 1, top_k=7, stop_ids=(9,), max_tokens=30))
    engine.add(request("g", [5, 6, 7], sampled=2, temperature=0.0, max_tokens=30))
    while engine.active:
        engine.step()
    drawn, greedy = server.last_bodies(2)
    assert drawn["cache_salt"] == server.label == "0:" + "a" * 16
    assert drawn["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 7,
        "min_p": 0.0,
        "seed": 2**63 - 1,
        "max_tokens": 30,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 3,
    }
    assert greedy["sampling_params"]["max_tokens"] == 28
    assert greedy["sampling_params"]["logprobs"] == 2
    assert drawn["request_id"] != greedy["request_id"]


def test_experts_are_asked_for_with_what_goes_out_and_forgotten_with_the_stay(
    server: FakeVllm, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("a" * 64)
    address = Address.of(server.url, server.key)
    engine = VllmEngine(tmp_path, slots=4, context_tokens=64, address=address, routes=True)
    engine.load(tmp_path / "a", version=0, digest="a" * 64)
    asked = replace(request("r", [5, 6, 7], max_tokens=9, routes=True), emit_every=4)
    routed = replace(asked, request="k", routed=3)
    silent = request("s", [8], max_tokens=9)
    result = routed_run(engine, [asked, routed, silent])
    converted = msgspec.convert(experts(0, 12), Routes)
    assert result["r"][1] == converted
    assert result["k"][1] == converted.part(3)
    assert "s" not in result
    bodies = [body["sampling_params"] for body in server.last_bodies(3)]
    assert [body.get("skip_reading_prefix_cache") for body in bodies] == [True, None, None]
    names = [body.get("extra_args", {}).get("routes_as") for body in bodies]
    assert names[:2] == [body["request_id"] for body in server.last_bodies(3)[:2]]
    engine.add(replace(asked, request="later"))
    _until(engine, "later")
    assert set(server.gone) == set(names[:2])
    engine.close()


def test_request_names_the_temperature_of_its_log_probs_where_it_is_not_one(
    server: FakeVllm, subject: Subject
) -> None:
    engine = _open(subject)
    engine.add(request("r", [5, 6], temperature=0.7, logprob_temperature=0.7, max_tokens=3))
    while engine.active:
        engine.step()
    (asked,) = server.last_bodies(1)
    assert asked["sampling_params"]["extra_args"] == {"logprob_temperature": 0.7}
    assert asked["sampling_params"]["logprobs"] == 2


def test_prompts_of_ended_requests_are_counted_as_the_server_says(
    server: FakeVllm, subject: Subject
) -> None:
    engine = _open(subject)
    before = engine.prompt_tokens
    server.cached_tokens = 32
    run(engine, [request(f"r{n}", [5] * 40, seed=n, max_tokens=1 + 8 * n) for n in range(4)])
    assert engine.prompt_tokens == PromptTokens(computed=before.computed + 4 * 8, reused=4 * 32)


def test_prompts_of_requests_that_are_let_go_are_not_counted(
    server: FakeVllm, subject: Subject
) -> None:
    engine = _open(subject)
    before = engine.prompt_tokens
    server.hold_after = {1: 3}
    engine.add(request("gone", [5], seed=1, max_tokens=30))
    engine.step()
    engine.cancel("gone")
    assert engine.prompt_tokens == before


def test_weights_change_behind_a_pause_in_vllms_own_order(
    server: FakeVllm, subject: Subject
) -> None:
    engine = _open(subject)
    del server.doors[:]
    (_, _), (second, digest) = subject.policies
    engine.load(second, version=7, digest=digest)
    assert server.doors == [
        "/collective_rpc",
        "/pause?mode=abort",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/resume",
    ]
    assert server.label == "7:" + "b" * 16


def test_refused_weights_open_no_other_door(server: FakeVllm, subject: Subject) -> None:
    engine = _open(subject)
    before = run(engine, [request("r", [5], max_tokens=9)])
    del server.doors[:]
    with pytest.raises(PolicyError, match="has the digest aaaa, not cccc of 3"):
        engine.load(subject.policies[0][0], version=3, digest="c" * 64)
    assert server.doors == ["/collective_rpc"]
    assert run(engine, [request("r", [5], max_tokens=9)]) == before


def test_request_that_is_let_go_is_aborted_in_the_server(
    server: FakeVllm, subject: Subject
) -> None:
    engine = _open(subject)
    server.hold_after = {1: 3, 2: 3}
    engine.add(request("gone", [5], seed=1, max_tokens=30))
    engine.add(request("moved", [5], seed=2, max_tokens=30))
    first = engine.step()
    assert first == []
    engine.cancel("gone")
    export = engine.export("moved")
    assert export is not None and export.kv is not None
    assert export.sampled is not None and len(export.sampled.token_ids) == 1
    assert engine.active == 0 and engine.export("moved") is None
    engine.close()
    names = [f"generate-tokens-{body['request_id']}" for body in server.last_bodies(2)]
    assert sorted(server.aborted) == sorted(names)


def test_stop_string_aborts_what_the_server_is_ahead(server: FakeVllm, subject: Subject) -> None:
    free = run(_open(subject), [request("r", [5], seed=3, max_tokens=60)])["r"]
    text = byte_decode(free.tokens[20:24])
    engine = subject.open(slots=2, decode=byte_decode)
    assert not server.aborted
    cut = run(engine, [request("r", [5], seed=3, max_tokens=60, stop=(text,))])["r"]
    assert cut.reason == "stop" and cut.tokens == free.tokens[: len(cut.tokens)]


def test_server_that_is_late_in_every_step_is_accounted_for(
    server: FakeVllm, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "STEP_WAIT_MS", 1)
    server.chunk_s = 0.004
    CHECKS["accounting"](subject)
    CHECKS["cancel"](subject)
    assert server.aborted


def test_row_that_waits_holds_nobody_up_twice(
    server: FakeVllm, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _open(subject)
    monkeypatch.setattr(vllm_server, "STEP_WAIT_MS", 300)
    server.hold_after = {1: 0}
    engine.add(request("waits", [5], seed=1, max_tokens=20))
    engine.add(request("runs", [5], seed=2, max_tokens=20))
    engine.step()
    monkeypatch.setattr(vllm_server, "STEP_WAIT_MS", 10**9)  # a second wait would never end
    done = _until(engine, "runs")
    assert done.reason == "length" and engine.active == 1
    monkeypatch.setattr(vllm_server, "STEP_WAIT_MS", 300)
    server.release.set()
    assert _until(engine, "waits").reason == "length"


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        ("refuse", "a bad request"),
        ("error", "it broke"),
        ("silent end", "without a reason"),
        ("nan", "is not finite"),
    ],
)
def test_request_that_goes_wrong_ends_alone_with_what_was_said(
    server: FakeVllm, subject: Subject, trouble: str, text: str
) -> None:
    engine = _open(subject)
    good = run(engine, [request("good", [5], seed=2, max_tokens=30)])["good"]
    server.trouble = {1: trouble}
    engine.add(request("bad", [5], seed=1, max_tokens=30))
    engine.add(request("good", [5], seed=2, max_tokens=30))
    beside, events = Result(), list[EngineEvent]()
    while engine.active:
        events += engine.step()
    ends = {event.request: event for event in events if isinstance(event, RequestFinished)}
    assert ends["bad"].reason == "error" and text in (ends["bad"].error or "")
    for event in events:
        if isinstance(event, TokensSampled | RequestFinished) and event.request == "good":
            take(beside, event)
    assert beside == good


def test_tokens_of_other_weights_break_the_promise(server: FakeVllm, subject: Subject) -> None:
    engine = _open(subject)
    server.trouble = {1: "other weights"}
    engine.add(request("r", [5], seed=1, max_tokens=3))
    with pytest.raises(InvariantBroken, match=r"r: vLLM sampled from other weights.*0:aaaa"):
        while engine.active:
            engine.step()


def test_log_probs_of_vllm_0_31_are_read_by_their_names() -> None:
    own = {"token": "token_id:7", "logprob": -0.5}
    drawn = {
        **own,
        "bytes": None,
        "top_logprobs": [own, {"token": "token_id:-4", "logprob": -0.25}],
    }
    no_number = {"token": "token_id:8", "logprob": None}
    choice = {"token_ids": [7, 8], "logprobs": {"content": [drawn, no_number]}}
    (read,) = wire.read_chunk(msgspec.json.encode({"choices": [choice]})).choices
    first, second = wire.tokens_of(read, SamplingParams(top_k=3))
    assert first == wire.Token(token=7, logprob=-0.5, sampler_logprob=-0.25, mark=-4)
    assert math.isnan(second.logprob) and second.mark == 0


def test_connection_that_breaks_is_one_error_of_the_server(
    server: FakeVllm, subject: Subject
) -> None:
    engine = _open(subject)
    server.trouble = {1: "cut"}
    engine.add(request("r", [5], seed=1, max_tokens=30))
    with pytest.raises(ResourceError, match=r"connection to vLLM's server at http://127.*failed"):
        while engine.active:
            engine.step()


def test_server_that_is_gone_is_one_error_whatever_is_asked(
    server: FakeVllm, subject: Subject
) -> None:
    engine = _open(subject)
    server.hold_after = {1: 3}
    engine.add(request("r", [5], seed=1, max_tokens=30))
    engine.step()
    server.close()
    for ask in (
        lambda: [engine.step() for _ in range(100)],
        lambda: engine.add(request("s", [5])),
        lambda: engine.reload_keeping(Path("a"), version=1, digest="a"),
    ):
        with pytest.raises(ResourceError, match="vLLM's server at http://127"):
            ask()


def test_silence_of_a_server_that_is_not_well_is_an_error(
    server: FakeVllm, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _open(subject)
    monkeypatch.setattr(vllm_server, "STEP_WAIT_MS", 20)
    monkeypatch.setattr(vllm_server, "SILENCE_MS", 0)
    server.hold_after = {1: 0}
    engine.add(request("r", [5], seed=1, max_tokens=30))
    assert engine.step() == []  # healthy, but slow
    server.healthy = False
    with pytest.raises(ResourceError, match=r"answered /health with 503"):
        engine.step()


@pytest.mark.parametrize("key", ["guessed", ""])
def test_another_key_is_refused_in_one_line(server: FakeVllm, tmp_path: Path, key: str) -> None:
    with pytest.raises(ResourceError, match="401") as raised:
        VllmEngine(tmp_path, slots=1, context_tokens=64, address=Address.of(server.url, key))
    assert raised.value.hint is not None and "key" in raised.value.hint
    assert "guessed" not in str(raised.value)


def test_server_that_is_too_small_is_refused(server: FakeVllm, tmp_path: Path) -> None:
    address = Address.of(server.url, server.key)
    with pytest.raises(ConfigError, match="64 slots and contexts of 256"):
        VllmEngine(tmp_path, slots=65, context_tokens=64, address=address)


@pytest.fixture
def stock(server: FakeVllm, tmp_path: Path) -> Iterator[tuple[VllmEngine, Path, str]]:
    server.stock = make_qwen2(tmp_path / "served", 0)
    engine = VllmEngine(
        tmp_path, slots=4, context_tokens=64, address=Address.of(server.url, server.key)
    )
    yield engine, server.stock, weights_digest(server.stock)
    engine.close()


def test_stock_server_generates_with_the_weights_of_its_directory_alone(
    server: FakeVllm, stock: tuple[VllmEngine, Path, str]
) -> None:
    engine, model, digest = stock
    assert engine.version == "0.32.0 stock" and not engine.declares
    engine.load(model / WEIGHTS, version=3, digest=digest)
    asked = [request("r", [5, 6], max_tokens=20), request("g", [5], max_tokens=9, temperature=0)]
    results = run(engine, asked)
    assert [len(result.tokens) for result in results.values()] == [20, 9]
    assert results["r"].logprobs == results["r"].sampler_logprobs
    assert set(results["g"].sampler_logprobs) == {0.0} and results["g"].logprobs[0] < 0
    assert all(body["prompt"] and body["return_token_ids"] for body in server.bodies)
    with pytest.raises(PolicyError, match=f"serve only {digest[:12]}"):
        engine.load(model / WEIGHTS, version=4, digest="b" * 64)
    assert run(engine, asked) == results


def test_stock_server_resumes_a_request_with_another_seed(
    server: FakeVllm, stock: tuple[VllmEngine, Path, str]
) -> None:
    engine, model, digest = stock
    engine.load(model / WEIGHTS, version=0, digest=digest)
    run(engine, [request("r", [5, 6], seed=7), request("s", [5, 6, 9], sampled=1, seed=7)])
    assert len({body["seed"] for body in server.bodies} | {7}) == 3


@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}])
def test_stock_server_takes_no_request_whose_log_probs_it_would_not_report(
    stock: tuple[VllmEngine, Path, str], params: dict[str, Any]
) -> None:
    engine, model, digest = stock
    engine.load(model / WEIGHTS, version=0, digest=digest)
    with pytest.raises(ValueError, match="temperature 1 or 0"):
        engine.add(request("r", [5], **params))
    assert engine.active == 0


def test_server_without_the_extension_says_what_it_lacks(server: FakeVllm, tmp_path: Path) -> None:
    server.facts = {"error": "its weight transfer is not 'dora-pipe'"}
    address = Address.of(server.url, server.key)
    with pytest.raises(PolicyError, match="weight transfer"):
        VllmEngine(tmp_path, slots=1, context_tokens=64, address=address)

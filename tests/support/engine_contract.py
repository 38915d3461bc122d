"""Engine contract as check functions; each check runs only for engines that declare the feature.

A `Subject` opens engines and has two policies. `CHECKS` contains all checks, including those of
`engine_moves` if imported. `run` drives an engine like a worker, refilling free slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from dora_pipe.producers.engines.engine import (
    BATCH_INVARIANT,
    COUNTER_SAMPLING,
    KV_EXPORT,
    PARTIAL_ROLLOUT,
    PREFILL_EXACT,
    SLEEP,
    Engine,
    EngineRequest,
    RequestFinished,
    SamplingParams,
    StopReason,
    TokensSampled,
    WeightsLoaded,
)

STEPS_MAX = 20_000
"""Step limit of a run."""
LENGTHS = (1, 2, 5, 31, 32, 33, 63, 64, 65, 100)
"""Prompt lengths around likely shape boundaries."""

Decode = Callable[[Sequence[int]], str]


class Open(Protocol):
    def __call__(
        self, *, slots: int, context_tokens: int = 256, decode: Decode | None = None
    ) -> Engine: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Engine under test. `policies` are two (weights file, digest), the first one loaded."""

    name: str
    open: Open
    vocabulary: int
    policies: tuple[tuple[Path, str], tuple[Path, str]]
    rounding: float = 0.0
    """Tolerance in nats between log-probs in different batches; 0: equal."""
    coarse: bool = False
    """Whether rounding may change sampled tokens."""
    keeping: Callable[..., Engine] | None = None
    """Opens an engine that declares `prefix_reuse`; `prefix_cache_ratio` is its budget."""
    ahead: bool = False
    """Whether the engine computes ahead of its steps: requests may end before they leave."""
    samples: bool = True
    """Whether its log-probs form a distribution."""


CHECKS: dict[str, Callable[[Subject], None]] = {}
"""Checks by name; each skips engines without the declared feature."""


def check(*needs: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def ask(subject: Subject, *given: Any, **named: Any) -> None:
            missing = set(needs) - subject.open(slots=1).declares if needs else set()
            if missing:
                pytest.skip(f"{subject.name} does not declare {', '.join(sorted(missing))}")
            function(subject, *given, **named)

        CHECKS[function.__name__.removeprefix("check_")] = ask
        return ask

    return add


def byte_decode(tokens: Sequence[int]) -> str:
    return bytes(token - 3 for token in tokens if 3 <= token < 259).decode(errors="replace")


@dataclass(slots=True)
class Result:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    reason: StopReason | None = None

    def after(self, tokens: int) -> Result:
        return Result(
            tokens=self.tokens[tokens:],
            logprobs=self.logprobs[tokens:],
            sampler_logprobs=self.sampler_logprobs[tokens:],
            reason=self.reason,
        )


def request(
    name: str, tokens: Sequence[int], *, seed: int = 7, sampled: int = 0, **params: object
) -> EngineRequest:
    settings = replace(SamplingParams(), **params)  # type: ignore[arg-type]
    return EngineRequest(
        request=name, token_ids=list(tokens), sampled=sampled, seed=seed, params=settings
    )


def requests(
    subject: Subject, count: int, *, seed: int = 1, max_tokens: int = 60
) -> list[EngineRequest]:
    chance = np.random.default_rng(seed)
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 5, "temperature": 1.3},
        {"min_p": 0.05},
        {"temperature": 0.0},
        {"temperature": 0.7, "logprob_temperature": 0.7},
    ]
    created = []
    for number in range(count):
        length = int(chance.choice(LENGTHS))
        # Half of them plain: mixed batches use another code path.
        which = int(chance.integers(1, len(settings))) if chance.random() < 0.5 else 0
        created.append(
            request(
                f"r{number}",
                chance.integers(0, subject.vocabulary, length).tolist(),
                seed=int(chance.integers(0, 2**63)),
                max_tokens=int(chance.integers(1, max_tokens + 1)),
                **settings[which],
            )
        )
    return created


def run(
    engine: Engine, requests: Iterable[EngineRequest], *, together: int | None = None
) -> dict[str, Result]:
    waiting = list(requests)[::-1]
    results: dict[str, Result] = {}
    for _ in range(STEPS_MAX):
        while waiting and engine.active < (together or engine.slots):
            results[waiting[-1].request] = Result()
            engine.add(waiting.pop())
        if not engine.active:
            return results
        for event in engine.step():
            assert not isinstance(event, WeightsLoaded)
            take(results[event.request], event)
    raise AssertionError(f"still {engine.active} active rows after {STEPS_MAX} steps")


def take(result: Result, event: TokensSampled | RequestFinished) -> None:
    assert result.reason is None, f"{event.request} got an event after its end"
    if isinstance(event, RequestFinished):
        result.reason = event.reason
        return
    assert event.token_ids, "an event without tokens"
    assert len(event.token_ids) == len(event.logprobs) == len(event.sampler_logprobs)
    result.tokens += event.token_ids
    result.logprobs += event.logprobs
    result.sampler_logprobs += event.sampler_logprobs


def assert_alike(subject: Subject, result: Result, expected_result: Result) -> None:
    """Compare a request in two batches within the subject's rounding; if coarse, up to the first
    changed token."""
    if not subject.rounding:
        assert result == expected_result
        return
    pairs = zip(result.tokens, expected_result.tokens, strict=False)
    same = next(
        (index for index, (entry, other) in enumerate(pairs) if entry != other),
        len(expected_result.tokens),
    )
    assert subject.coarse or result.tokens == expected_result.tokens
    assert subject.coarse or result.reason == expected_result.reason
    near = subject.rounding
    assert result.logprobs[:same] == pytest.approx(expected_result.logprobs[:same], abs=near)
    if not subject.coarse:  # if coarse, truncation may remove another token
        assert result.sampler_logprobs == pytest.approx(expected_result.sampler_logprobs, abs=near)


def assert_all_alike(
    subject: Subject, results: Mapping[str, Result], expected_results: Mapping[str, Result]
) -> None:
    assert results.keys() == expected_results.keys()
    for name, result in expected_results.items():
        assert_alike(subject, results[name], result)


@check()
def check_requests_run_to_their_end(subject: Subject) -> None:
    engine = subject.open(slots=6)
    all_requests = requests(subject, 25)
    results = run(engine, all_requests)
    for request in all_requests:
        result = results[request.request]
        assert result.reason == "length"
        assert len(result.tokens) == request.params.max_tokens
        assert all(0 <= token < subject.vocabulary for token in result.tokens)
        assert all(np.isfinite(result.logprobs)) and max(result.logprobs) <= 0
        assert max(result.sampler_logprobs) <= 0
    assert engine.active == 0 and engine.kv_used_tokens == 0
    assert engine.step() == []


@check()
def check_declarations_are_known(subject: Subject) -> None:
    engine = subject.open(slots=3, context_tokens=64)
    features = {
        COUNTER_SAMPLING,
        BATCH_INVARIANT,
        PREFILL_EXACT,
        KV_EXPORT,
        PARTIAL_ROLLOUT,
        SLEEP,
    }
    assert engine.declares <= features
    assert engine.slots == 3 and engine.context_tokens == 64
    assert engine.name and engine.version and engine.device and engine.dtype


@check()
def check_tokens_are_emitted_as_asked(subject: Subject) -> None:
    engine = subject.open(slots=4)
    full = run(engine, [request("r", [5, 6, 7], max_tokens=23)])["r"]
    engine.add(replace(request("r", [5, 6, 7], max_tokens=23), emit_every=5))
    chunks, result, firsts = [], Result(), set()
    while engine.active:
        for event in engine.step():
            assert not isinstance(event, WeightsLoaded)
            take(result, event)
            if isinstance(event, TokensSampled):
                chunks.append(len(event.token_ids))
                firsts.add(event.first_token_ns)
    assert chunks == [5, 5, 5, 5, 3]
    assert result == full
    assert len(firsts) == 1


@check()
def check_refusals(subject: Subject) -> None:
    engine = subject.open(slots=2, context_tokens=64)
    engine.add(request("a", [5], max_tokens=64))
    bad = [
        request("a", [5]),
        request("b", []),
        request("b", [5] * 64),
        request("b", [5, 6], sampled=3),
        request("b", [5, 6], sampled=2, max_tokens=2),
        request("b", [5], stop=("x",)),
    ]
    for req in bad:
        with pytest.raises(ValueError, match=req.request):
            engine.add(req)
    engine.add(request("b", [5] * 63))
    with pytest.raises(ValueError, match="slots"):
        engine.add(request("c", [5]))
    assert engine.active == 2


@check()
def check_a_context_that_is_too_long_is_refused_alike(subject: Subject) -> None:
    """A prompt without room for a token is rejected with the same line by every engine; with
    less room than `max_tokens` it runs to the end of the context."""
    engine = subject.open(slots=2, context_tokens=48)
    for length in (48, 49, 200):
        with pytest.raises(ValueError) as caught:
            engine.add(request("long", [5] * length, max_tokens=1))
        assert str(caught.value) == f"long: {length} tokens leave no room in a context of 48"
    again = request("long", [5] * 48, sampled=8, max_tokens=99)  # it ended earlier
    with pytest.raises(ValueError, match="leave no room"):
        engine.add(again)
    assert engine.active == 0
    result = run(engine, [request("r", [5] * 45, max_tokens=10**6)])["r"]
    assert (len(result.tokens), result.reason) == (3, "length")


@check()
def check_cancel(subject: Subject) -> None:
    all_requests = requests(subject, 6)
    alone = run(subject.open(slots=6), all_requests)
    engine = subject.open(slots=6)
    for request in all_requests:
        engine.add(request)
    engine.cancel("nobody")
    engine.cancel("r0")
    results = {request.request: Result() for request in all_requests}
    for steps in range(STEPS_MAX):
        if not engine.active:
            break
        if steps == 1:
            engine.cancel("r3")
        for event in engine.step():
            assert not isinstance(event, WeightsLoaded)
            take(results[event.request], event)
    assert engine.active == 0 and engine.kv_used_tokens == 0
    for name in ("r1", "r2", "r4", "r5"):
        assert_alike(subject, results[name], alone[name])
    assert results["r0"] == Result()
    assert results["r3"].reason is None or len(alone["r3"].tokens) <= 1
    assert_all_alike(subject, run(engine, all_requests), alone)


@check()
def check_stop_ids(subject: Subject) -> None:
    engine = subject.open(slots=2)
    free = run(engine, [request("r", [5, 6], max_tokens=50)])["r"]
    stop = free.tokens[20]
    first = free.tokens.index(stop) + 1
    other = next(t for t in range(subject.vocabulary) if t not in free.tokens)
    result = run(engine, [request("r", [5, 6], max_tokens=50, stop_ids=(other, stop))])["r"]
    assert result.reason == "stop"
    assert result.tokens == free.tokens[:first]
    assert run(engine, [request("r", [5, 6], max_tokens=50, stop_ids=(other,))])["r"] == free


@check()
def check_stop_strings(subject: Subject, decode: Decode = byte_decode) -> None:
    """A stop string ends a request with its completing token, also after a restart."""
    engine = subject.open(slots=2, decode=decode)
    free = run(engine, [request("r", [5, 6], max_tokens=50)])["r"]
    end = next(n for n in range(12, 50) if decode(free.tokens[n - 3 : n]).isascii())
    text = decode(free.tokens[end - 3 : end])
    first = next(n for n in range(51) if text in decode(free.tokens[:n]))
    result = run(engine, [request("r", [5, 6], max_tokens=50, stop=("never", text))])["r"]
    assert result.reason == "stop"
    assert result.tokens == free.tokens[:first]
    for cut in () if subject.coarse else (first - 2, first - 1):  # in the middle of the stop string
        tokens = [5, 6, *free.tokens[:cut]]
        rest = run(engine, [request("r", tokens, sampled=cut, max_tokens=50, stop=(text,))])["r"]
        assert rest.reason == "stop" and rest.tokens == free.tokens[cut:first]


@check()
def check_context_end(subject: Subject) -> None:
    engine = subject.open(slots=2, context_tokens=48)
    results = run(engine, [request("a", [5] * 40, max_tokens=99), request("b", [5] * 47)])
    assert len(results["a"].tokens) == 8 and results["a"].reason == "length"
    assert len(results["b"].tokens) == 1 and results["b"].reason == "length"


@check(COUNTER_SAMPLING)
def check_counter_sampling(subject: Subject) -> None:
    """Seed and position determine samples; greedy requests have log-prob 0."""
    engine = subject.open(slots=8)
    assert COUNTER_SAMPLING in engine.declares
    same = request("r", [5, 6, 7], max_tokens=40)
    first, second = run(engine, [same])["r"], run(engine, [same])["r"]
    assert first == second
    assert first.sampler_logprobs == first.logprobs
    rest = [replace(same, request=f"s{seed}", seed=seed) for seed in (8, 9, 2**63 - 1)]
    drawn = [tuple(entry.tokens) for entry in run(engine, rest).values()]
    assert len({tuple(first.tokens), *drawn}) == 4
    greedy = [request(f"g{seed}", [5, 6, 7], seed=seed, temperature=0.0) for seed in (1, 2)]
    entry, two = run(engine, greedy).values()
    assert entry.tokens == two.tokens
    assert set(entry.sampler_logprobs) == {0.0}


@check(BATCH_INVARIANT)
def check_batch_invariance(subject: Subject, *, count: int = 40, max_tokens: int = 60) -> None:
    assert BATCH_INVARIANT in subject.open(slots=1).declares
    all_requests = requests(subject, count, seed=2, max_tokens=max_tokens)
    engine = subject.open(slots=48)
    reference = run(engine, all_requests)
    for together, order in ((1, 1), (3, -1), (7, 1), (9, -1), (20, 1), (48, -1)):
        subset = all_requests[: 5 * together + 1]  # refill every slot several times
        results = run(engine, subset[::order], together=together)
        assert results == {name: reference[name] for name in results}, f"{together} together"


@check(PREFILL_EXACT)
def check_exact_prefill(subject: Subject, *, count: int = 24, max_tokens: int = 60) -> None:
    engine = subject.open(slots=16)
    assert PREFILL_EXACT in engine.declares
    all_requests = requests(subject, count, seed=3, max_tokens=max_tokens)
    full = run(engine, all_requests)
    cuts = {}
    for request in all_requests:
        tokens = full[request.request].tokens
        for cut in {1, len(tokens) // 2, len(tokens) - 1} - {0}:
            if cut < len(tokens):
                name = f"{request.request}@{cut}"
                prefix = [*request.token_ids, *tokens[:cut]]
                cuts[name] = (
                    replace(request, request=name, token_ids=prefix, sampled=cut),
                    full[request.request].after(cut),
                )
    results = run(engine, [entry for entry, _ in cuts.values()])
    assert results == {name: rest for name, (_, rest) in cuts.items()}


@check()
def check_load(subject: Subject) -> None:
    (first, first_digest), (second, second_digest) = subject.policies
    engine = subject.open(slots=4)
    all_requests = requests(subject, 4)
    before = run(engine, all_requests)
    engine.add(all_requests[0])
    with pytest.raises(ValueError, match="active"):
        engine.load(second, version=1, digest=second_digest)
    engine.cancel(all_requests[0].request)
    loaded = engine.load(second, version=1, digest=second_digest)
    assert (loaded.version, loaded.digest) == (1, second_digest) and loaded.load_ms >= 0
    assert run(engine, all_requests) != before
    engine.load(first, version=2, digest=first_digest)
    assert_all_alike(subject, run(engine, all_requests), before)


@check(SLEEP)
def check_sleep(subject: Subject) -> None:
    (first, digest), _ = subject.policies
    engine = subject.open(slots=4)
    all_requests = requests(subject, 4)
    before = run(engine, all_requests)
    engine.add(all_requests[0])
    with pytest.raises(ValueError, match="active"):
        engine.sleep()
    engine.cancel(all_requests[0].request)
    asleep = engine.sleep()
    assert (asleep.version, asleep.digest) == (-1, "")
    with pytest.raises(ValueError, match="no weights"):
        engine.add(all_requests[0])
    engine.load(first, version=5, digest=digest)
    assert_all_alike(subject, run(engine, all_requests), before)


@check()
def check_accounting(subject: Subject) -> None:
    """`active` and `kv_used_tokens` count all tokens of each row, with or without the last; a
    row without tokens counts up to its prompt."""
    engine = subject.open(slots=4)
    assert (engine.active, engine.kv_used_tokens) == (0, 0)
    lengths = {"a": 10, "b": 20}
    for name, length in lengths.items():
        req = request(name, [5] * length, max_tokens=5 if name == "a" else 9)
        engine.add(replace(req, emit_every=1))
    sampled = dict.fromkeys(lengths, 0)
    for _ in range(STEPS_MAX):
        assert engine.active == len(lengths)
        least = sum(lengths[name] + sampled[name] - 1 for name in lengths if sampled[name])
        most = sum(lengths[name] + sampled[name] for name in lengths)
        assert least <= engine.kv_used_tokens <= most
        if not lengths:
            break
        for event in engine.step():
            if isinstance(event, TokensSampled):
                sampled[event.request] += len(event.token_ids)
            elif isinstance(event, RequestFinished):
                del lengths[event.request]
    assert (engine.active, sampled) == (0, {"a": 5, "b": 9})


@check()
def check_logprobs_are_at_the_temperature_asked_for(subject: Subject) -> None:
    """Without truncation, log-probs are those of the sampling distribution, also in mixed
    batches; tokens do not depend on them."""
    hot: dict[str, Any] = {"temperature": 0.7, "max_tokens": 20}
    expected = [
        request("raw", [5, 6, 7], seed=3, **hot),
        request("tempered", [5, 6, 7], seed=3, logprob_temperature=0.7, **hot),
        request("cut", [5, 6, 7], seed=3, logprob_temperature=0.7, top_k=4, **hot),
        request("plain", [5, 6, 7], seed=3, max_tokens=20),
    ]
    result = run(subject.open(slots=4), expected)
    raw, tempered, cut, plain = (result[request.request] for request in expected)
    assert plain.logprobs == plain.sampler_logprobs
    near = 1e-5 + subject.rounding
    assert np.allclose(tempered.logprobs, tempered.sampler_logprobs, atol=near)
    if not subject.coarse:
        assert tempered.tokens == raw.tokens
        assert np.allclose(tempered.logprobs, raw.sampler_logprobs, atol=near)
    if subject.samples:
        assert not np.allclose(raw.logprobs, raw.sampler_logprobs, atol=0.05)
        assert all(a < b for a, b in zip(cut.logprobs, cut.sampler_logprobs, strict=True))

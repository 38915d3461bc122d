"""Engine contract for interrupted requests: export, import, weight changes.

Extends `engine_contract`. A carrier transports a KV cache between engines; the plain one passes the
object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dora_pipe.producers.engines.engine import (
    BATCH_INVARIANT,
    KV_EXPORT,
    PARTIAL_ROLLOUT,
    Engine,
    EngineRequest,
    Exported,
    Kv,
    WeightsLoaded,
)
from tests.support.engine_contract import (
    CHECKS,
    Result,
    Subject,
    assert_alike,
    assert_all_alike,
    check,
    request,
    requests,
    run,
    take,
)

__all__ = ["CHECKS"]

Carrier = Callable[[Kv], Kv | None]
"""None: the cache is lost and the request is prefilled."""

STEPS_MAX = 5000
ATTEMPTS_MAX = 50


def plain(kv: Kv) -> Kv | None:
    return kv


def steps(engine: Engine, results: dict[str, Result], count: int) -> None:
    for _ in range(count):
        for event in engine.step():
            assert not isinstance(event, WeightsLoaded)
            take(results[event.request], event)


def finish(engine: Engine, results: dict[str, Result]) -> None:
    for _ in range(STEPS_MAX):
        if not engine.active:
            return
        steps(engine, results, 1)
    raise AssertionError("the engine does not end")


def move(
    source: Engine,
    target: Engine,
    request: EngineRequest,
    result: Result,
    carry: Carrier = plain,
    *,
    ahead: bool = False,
) -> bool:
    """Move a request between engines; return whether its cache moved too. An engine that
    computes `ahead` may have ended it."""
    export = source.export(request.request)
    if ahead and export is None:
        return False
    assert export is not None and source.export(request.request) is None
    if export.sampled is not None:
        take(result, export.sampled)
    sequence = [*request.token_ids, *result.tokens]
    kv = carry(export.kv) if export.kv is not None else None
    again = replace(
        request,
        token_ids=sequence,
        sampled=request.sampled + len(result.tokens),
        kv=kv,
        emit_every=7,
    )
    if kv is not None:
        assert kv.tokens == len(sequence) - 1
        assert target.kv_error(again) is None
    target.add(again)
    return kv is not None


def taken_out(engine: Engine, request: EngineRequest, *, after: int) -> Exported:
    """Export a request after some steps; retry if the engine already ended it."""
    for _ in range(ATTEMPTS_MAX):
        engine.add(request)
        steps(engine, {}, after)
        export = engine.export(request.request)
        if export is not None:
            return export
        finish(engine, {request.request: Result()})
    raise AssertionError(f"{request.request} is never given out")


@check(KV_EXPORT, BATCH_INVARIANT)
def check_moved_requests_end_as_if_they_had_stayed(
    subject: Subject, carry: Carrier = plain, *, count: int = 16, cuts: Sequence[int] = (1, 7, 40)
) -> None:
    source, target = subject.open(slots=count + 4), subject.open(slots=count + 8)
    assert KV_EXPORT in source.declares
    all_requests = requests(subject, count, seed=4, max_tokens=90)
    wholes = run(subject.open(slots=count), all_requests)
    for cut in cuts:
        company = requests(subject, 6, seed=cut, max_tokens=150)
        company = [replace(request, request=f"c{request.request}") for request in company]
        results = {request.request: Result() for request in [*all_requests, *company]}
        for req in company:
            target.add(req)
        steps(target, results, 3)
        for req in all_requests:
            source.add(replace(req, emit_every=5))
        steps(source, results, cut)
        running = [request for request in all_requests if results[request.request].reason is None]
        for req in running[::2]:
            went_along = move(source, target, req, results[req.request], carry)
            # The first step may not prefill every prompt.
            assert went_along or cut == 1 or carry is not plain
            steps(target, results, 1)
        finish(source, results)
        finish(target, results)
        assert {request.request: results[request.request] for request in all_requests} == wholes, (
            f"cut {cut}"
        )
        assert (source.kv_used_tokens, target.kv_used_tokens) == (0, 0)


@check(KV_EXPORT)
def check_a_request_moves_again_and_again(subject: Subject, carry: Carrier = plain) -> None:
    engines = [subject.open(slots=3), subject.open(slots=5)]
    req = request("r", [5, 6, 7, 8], max_tokens=240, seed=3)
    full = run(engines[0], [req])["r"]
    result = {"r": Result()}
    engines[0].add(req)
    for index, between in enumerate((1, 0, 2, 27, 33, 0, 0, 31)):
        steps(engines[index % 2], result, between)
        source, target = engines[index % 2], engines[1 - index % 2]
        move(source, target, req, result["r"], carry, ahead=subject.ahead)
    finish(engines[0], result)
    finish(engines[1], result)
    assert result["r"] == full


@check(KV_EXPORT)
def check_what_is_not_complete_has_no_cache(subject: Subject) -> None:
    """Requests without prefill or with one token have no cache; their slots become free."""
    engine = subject.open(slots=2)
    assert engine.export("nobody") is None
    engine.add(request("a", [5, 6, 7]))
    engine.add(request("b", [5]))
    for name in "ab":
        export = engine.export(name)
        assert export is not None and (export.sampled, export.kv) == (None, None)
    assert engine.active == 0 and engine.step() == []
    all_requests = requests(subject, 4)
    assert run(engine, all_requests) == run(subject.open(slots=2), all_requests)


@check(KV_EXPORT, BATCH_INVARIANT)
def check_export_leaves_the_others_alone(subject: Subject) -> None:
    all_requests = requests(subject, 10, seed=6, max_tokens=60)
    alone = run(subject.open(slots=10), all_requests)
    engine = subject.open(slots=10)
    results = {request.request: Result() for request in all_requests}
    for req in all_requests:
        engine.add(req)
    removed = []
    for name in ("r0", "r9", "r4", "r5"):
        steps(engine, results, 2)
        if engine.export(name) is not None:
            removed.append(name)
    finish(engine, results)
    assert removed
    for name, result in results.items():
        assert name in removed or result == alone[name]


@check(KV_EXPORT)
def check_unfit_caches_are_refused(subject: Subject) -> None:
    engine = subject.open(slots=2)
    req = request("r", [5, 6, 7, 8], max_tokens=200)
    exported: list[EngineRequest] = []
    for weights, digest in (*subject.policies[::-1],):
        engine.load(weights, version=len(exported), digest=digest)
        result = taken_out(engine, req, after=4)
        assert result.sampled is not None and result.kv is not None
        sequence = [*req.token_ids, *result.sampled.token_ids]
        done = len(result.sampled.token_ids)  # a busy server may return fewer than one per step
        exported.append(replace(req, token_ids=sequence, sampled=done, kv=result.kv))
    other, good = exported
    kv = good.kv
    assert kv is not None
    unfit = {
        "other weights": other.kv,
        "another layout": replace(kv, layout="x"),
        "another number of tokens": replace(kv, tokens=kv.tokens - 1),
        "another type": replace(kv, array=kv.array.astype(np.float16)),
        "another shape": replace(kv, array=kv.array[:-1]),
    }
    for why, bad in unfit.items():
        refused = replace(good, kv=bad)
        assert engine.kv_error(refused) == why
        with pytest.raises(ValueError, match=why):
            engine.add(refused)
        assert engine.active == 0
    assert engine.kv_error(good) is None and engine.kv_error(req) is None
    assert run(engine, [good])["r"] == run(subject.open(slots=1), [req])["r"].after(good.sampled)


@check(PARTIAL_ROLLOUT)
def check_weights_change_under_running_requests(subject: Subject) -> None:
    """Earlier tokens stay; later ones equal those of a new request with that prefix and the new
    weights. Tokens before `WeightsLoaded` have the old weights, emitted or not."""
    (_, _), (second, digest) = subject.policies
    engine, fresh = subject.open(slots=12), subject.open(slots=12)
    assert PARTIAL_ROLLOUT in engine.declares
    fresh.load(second, version=1, digest=digest)
    all_requests = requests(subject, 10, seed=8, max_tokens=90)
    wholes = run(subject.open(slots=10), all_requests)
    results = {request.request: Result() for request in all_requests}
    for number, req in enumerate(all_requests):
        engine.add(replace(req, emit_every=(0, 4)[number % 2]))
    steps(engine, results, 6)
    *pending, loaded = engine.reload_keeping(second, version=1, digest=digest)
    assert isinstance(loaded, WeightsLoaded) and (loaded.version, loaded.digest) == (1, digest)
    for event in pending:
        assert not isinstance(event, WeightsLoaded)
        take(results[event.request], event)
    cuts, rests = {}, []
    for req in all_requests:
        result = results[req.request]
        assert_alike(subject, result, replace_reason(wholes[req.request], result))
        if result.reason is None:
            cut = cuts[req.request] = len(result.tokens)
            rests.append(replace(req, token_ids=[*req.token_ids, *result.tokens], sampled=cut))
    assert rests and (subject.ahead or {cuts[rest.request] for rest in rests} == {6})
    engine.add(request("late", [9, 8, 7], max_tokens=20))
    results["late"] = Result()
    finish(engine, results)
    expected = run(fresh, [*rests, request("late", [9, 8, 7], max_tokens=20)])
    for name, cut in [*cuts.items(), ("late", 0)]:
        assert_alike(subject, results[name].after(cut), expected[name])
    assert engine.kv_used_tokens == 0


def replace_reason(result: Result, part: Result) -> Result:
    size = len(part.tokens)
    return Result(
        tokens=result.tokens[:size],
        logprobs=result.logprobs[:size],
        sampler_logprobs=result.sampler_logprobs[:size],
        reason=part.reason,
    )


@check(PARTIAL_ROLLOUT)
def check_weights_change_again_and_again(subject: Subject) -> None:
    """Weights change before the first step, twice in a row, and back."""
    first, second = subject.policies
    engine = subject.open(slots=2)
    req = request("r", [5, 6, 7], max_tokens=60, seed=4)
    result = {"r": Result()}
    engine.add(replace(req, emit_every=1))
    for version, between in enumerate((0, 3, 0, 33, 2)):
        steps(engine, result, between)
        path, digest = (second, first)[version % 2]
        (loaded,) = engine.reload_keeping(path, version=version, digest=digest)
        assert isinstance(loaded, WeightsLoaded)
    cut = len(result["r"].tokens)
    finish(engine, result)
    again = replace(req, token_ids=[*req.token_ids, *result["r"].tokens[:cut]], sampled=cut)
    other = subject.open(slots=2)
    other.load(second[0], version=1, digest=second[1])
    assert_alike(subject, result["r"].after(cut), run(other, [again])["r"])


@check(PARTIAL_ROLLOUT)
def check_refused_weights_leave_running_requests_alone(subject: Subject) -> None:
    from dora_pipe.core.errors import PolicyError

    engine = subject.open(slots=4)
    all_requests = requests(subject, 4, seed=9)
    wholes = run(engine, all_requests)
    results = {request.request: Result() for request in all_requests}
    for req in all_requests:
        engine.add(req)
    steps(engine, results, 2)
    with pytest.raises(PolicyError):
        engine.reload_keeping(subject.policies[1][0], version=1, digest="")
    finish(engine, results)
    assert_all_alike(subject, results, wholes)

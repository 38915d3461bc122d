"""Engine contract for `prefix_reuse`: equal bits with and without kept prefixes.

Seeded episodes of groups with equal prompts continue from all or part of their tokens. `play` runs
them with as many at a time as the engine has slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from dora_pipe.producers.engines.engine import (
    PARTIAL_ROLLOUT,
    PREFIX_REUSE,
    Engine,
    EngineEvent,
    EngineRequest,
    PromptTokens,
    RequestFinished,
    WeightsLoaded,
)
from tests.support.engine_contract import Result, Subject, request, run, take

STEPS_MAX = 20_000
CONTEXT_TOKENS = 256


@dataclass(slots=True)
class Episode:
    """Trajectory of a group: its next prompt and pre-drawn observations."""

    name: str
    ids: list[int]
    answers: deque[tuple[int, list[int]]]
    """Per turn: (tokens to keep, tokens to append)."""
    seed: int
    done: list[Result] = field(default_factory=list)


def episodes(subject: Subject, seed: int, *, groups: int = 2, size: int = 3) -> list[Episode]:
    chance = np.random.default_rng(seed)

    def random_tokens(most: int) -> list[int]:
        return list(
            map(int, chance.integers(0, min(90, subject.vocabulary), chance.integers(most)))
        )

    system, result = random_tokens(60), []
    for group in range(groups):
        prompt = [5, *system[: chance.integers(len(system) + 1)], *random_tokens(90)]
        for sample in range(size):
            cuts = [0.5 if chance.random() < 0.2 else 1.0 for _ in range(chance.integers(4))]
            result.append(
                Episode(
                    name=f"{group}-{sample}",
                    ids=list(prompt),
                    answers=deque((int(100 * cut), random_tokens(30)) for cut in cuts),
                    seed=int(chance.integers(1 << 40)),
                )
            )
    return result


def play(
    engine: Engine, episodes: list[Episode], *, max_tokens: int = 12
) -> dict[str, list[Result]]:
    waiting, running = deque(episodes), dict[str, tuple[Episode, Result]]()
    for _ in range(STEPS_MAX):
        while waiting and engine.active < engine.slots:
            episode = waiting.popleft()
            running[episode.name] = episode, Result()
            engine.add(request(episode.name, episode.ids, seed=episode.seed, max_tokens=max_tokens))
        if not engine.active:
            return {episode.name: episode.done for episode in episodes}
        for event in engine.step():
            assert not isinstance(event, WeightsLoaded)
            episode, result = running[event.request]
            take(result, event)
            if isinstance(event, RequestFinished) and _goes_on(episode, result):
                waiting.append(episode)
    raise AssertionError(f"still {engine.active} active rows after {STEPS_MAX} steps")


def _goes_on(episode: Episode, result: Result) -> bool:
    episode.done.append(result)
    if not episode.answers:
        return False
    share, more = episode.answers.popleft()
    full = [*episode.ids, *result.tokens]
    episode.ids = [*full[: max(1, len(full) * share // 100)], *more]
    return len(episode.ids) < CONTEXT_TOKENS


def opens_keeping(subject: Subject) -> Callable[..., Engine]:
    if subject.keeping is None:
        pytest.skip(f"{subject.name} does not declare {PREFIX_REUSE}")
    assert PREFIX_REUSE in subject.keeping(slots=1).declares
    assert PREFIX_REUSE not in subject.open(slots=1).declares
    return subject.keeping


def check_kept_prefixes_change_no_bit(
    subject: Subject, plain: Engine, keeping: Engine, seed: int
) -> None:
    before, before_plain = keeping.prompt_tokens, plain.prompt_tokens
    expected = play(plain, episodes(subject, seed))
    assert play(keeping, episodes(subject, seed)) == expected
    assert plain.prompt_tokens.reused == 0
    spent = since(keeping, before)
    assert spent.computed + spent.reused == since(plain, before_plain).computed


def check_samples_compute_their_prompt_once(subject: Subject, *, size: int = 8) -> None:
    open_keeping = opens_keeping(subject)
    prompt = list(range(3, 83)) * 2
    group = [
        Episode(name=f"s{seed}", ids=list(prompt), answers=deque(), seed=seed)
        for seed in range(size)
    ]
    plain, keeping = subject.open(slots=size), open_keeping(slots=size)
    expected = play(plain, [replace(entry, done=[]) for entry in group])
    assert play(keeping, group) == expected
    assert plain.prompt_tokens == PromptTokens(computed=size * (len(prompt) - 1))
    once = len(prompt) - 1
    assert keeping.prompt_tokens == PromptTokens(computed=once, reused=(size - 1) * once)


def check_a_turn_computes_what_was_said_since(subject: Subject) -> None:
    """Computes only the last sampled token, whose keys were not needed, and the new ones."""
    engine = opens_keeping(subject)(slots=2)
    episode = Episode(name="e", ids=[5] * 40, answers=deque([(100, [7] * 9)] * 3), seed=1)
    play(engine, [episode], max_tokens=20)
    starts = [40 + 29 * turn for turn in range(4)]  # per turn: 20 sampled, 9 appended
    assert engine.prompt_tokens.computed == 39 + 3 * 9
    assert engine.prompt_tokens.reused == sum(start - 1 - 9 for start in starts[1:])


def check_request_that_nobody_goes_on_from_leaves_only_its_prompt(subject: Subject) -> None:
    engine = opens_keeping(subject)(slots=2)
    first = replace(request("r", [5] * 40, max_tokens=30), keep=False)
    tokens = _run_one(engine, first).tokens
    _run_one(engine, request("s", [*first.token_ids, *tokens, 6], max_tokens=2))
    assert engine.prompt_tokens.reused == 40


def check_versions_that_are_replaced_take_theirs_along(subject: Subject) -> None:
    engine = opens_keeping(subject)(slots=2)
    (_, first), (_, second) = subject.policies
    asked = request("r", [5, 6, 7] * 20, max_tokens=9)
    expected = _run_one(engine, asked)
    assert _run_one(engine, asked) == expected
    assert engine.prompt_tokens.reused == 59
    for version, digest, path in ((1, second, 1), (2, first, 0)):
        engine.load(subject.policies[path][0], version=version, digest=digest)
        result = _run_one(engine, asked)
        assert (result == expected) == (digest == first)
    assert engine.prompt_tokens.reused == 59


def check_interrupted_requests_go_on_from_nothing_older(subject: Subject) -> None:
    """Requests equal new ones with these tokens and weights."""
    engine = opens_keeping(subject)(slots=4)
    if PARTIAL_ROLLOUT not in engine.declares:
        pytest.skip(f"{subject.name} does not declare {PARTIAL_ROLLOUT}")
    path, digest = subject.policies[1]
    results = {f"r{seed}": Result() for seed in range(3)}
    asked = {
        name: request(name, [5, 6, 7] * 20, seed=seed, max_tokens=40)
        for seed, name in enumerate(results)
    }
    for trajectory in asked.values():
        engine.add(trajectory)
    for _ in range(10):
        _take_all(engine.step(), results)
    _take_all(engine.reload_keeping(path, version=1, digest=digest), results)
    spent = engine.prompt_tokens
    before = {name: list(result.tokens) for name, result in results.items()}
    while engine.active:
        _take_all(engine.step(), results)
    # One matches completely, the others up to their common prefix.
    assert since(engine, spent).computed >= 60 + max(map(len, before.values())) - 1
    plain = subject.open(slots=4)
    plain.load(path, version=1, digest=digest)
    for name, trajectory in asked.items():
        tokens = [*trajectory.token_ids, *before[name]]
        fresh = replace(trajectory, token_ids=tokens, sampled=len(before[name]))
        assert _run_one(plain, fresh).tokens == results[name].tokens[len(before[name]) :]


def check_cache_of_another_engine_is_kept_for_nobody(subject: Subject) -> None:
    source, engine = subject.open(slots=1), opens_keeping(subject)(slots=2)
    req = request("r", [5] * 40, max_tokens=30)
    source.add(req)
    for _ in range(5):
        source.step()
    exported = source.export("r")
    assert exported is not None and exported.sampled is not None
    if exported.kv is None:
        pytest.skip(f"{subject.name} hands over no caches")
    tokens = exported.sampled.token_ids
    goes_on = replace(req, token_ids=[*req.token_ids, *tokens], sampled=len(tokens))
    full = _run_one(engine, replace(goes_on, kv=exported.kv))
    _run_one(engine, request("s", [*goes_on.token_ids, *full.tokens], max_tokens=2))
    assert engine.prompt_tokens.reused == 0


def since(engine: Engine, before: PromptTokens) -> PromptTokens:
    now = engine.prompt_tokens
    return PromptTokens(computed=now.computed - before.computed, reused=now.reused - before.reused)


def _run_one(engine: Engine, asked: EngineRequest) -> Result:
    (result,) = run(engine, [asked]).values()
    return result


def _take_all(events: Sequence[EngineEvent], results: dict[str, Result]) -> None:
    for event in events:
        if not isinstance(event, WeightsLoaded):
            take(results[event.request], event)


CHECKS = {
    one.__name__.removeprefix("check_"): one
    for one in (
        check_samples_compute_their_prompt_once,
        check_a_turn_computes_what_was_said_since,
        check_request_that_nobody_goes_on_from_leaves_only_its_prompt,
        check_versions_that_are_replaced_take_theirs_along,
        check_interrupted_requests_go_on_from_nothing_older,
        check_cache_of_another_engine_is_kept_for_nobody,
    )
}

"""A worker with the torch engine: what a killed or a crowded request must not change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.engine import SamplingParams
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.producers.tasks.calls import EnvObserved, EnvStep, PromptCall, PromptReady
from dora_pipe.producers.worker.kv_handover import Handover, KvHandover, NoHandover
from dora_pipe.schemas.control import RequestReleased, TrajectoryLogged
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.transfers.files import MappedFiles
from tests.support.inline_tasks import InlineTasks
from tests.support.models import make_qwen2
from tests.support.worker import HEARTBEAT_NS, TICK_NS, VirtualClock, Worker, World

KILLED_AT = 200
CHECKPOINT_TOKENS = 32
LONG = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PolicyStore, str, Path]:
    path = tmp_path_factory.mktemp("model")
    store = PolicyStore(path / "policies")
    manifest, assets = import_model(store, make_qwen2(path / "made", context_tokens=768))
    return store, manifest.digest, store.assets_path(assets)


def _world(
    model: tuple[PolicyStore, str, Path],
    steps_max: int = 8,
    handover: Handover | None = None,
    prefix_cache_ratio: float = 0.0,
) -> World:
    store, digest, assets = model
    return World(
        handover=handover,
        steps_max=steps_max,
        policies={0: digest},
        weights_path=store.weights_path,
        engine=lambda setup: TorchEngine.open(
            assets,
            slots=setup.slots,
            context_tokens=setup.context_tokens,
            threads=1,
            decode=Tokenizer(assets).full_text,
            prefix_cache_ratio=prefix_cache_ratio,
        ),
    )


def _start(world: World, worker: str, **changes: Any) -> Worker:
    long = SamplingParams(max_tokens=LONG)
    short = SamplingParams(max_tokens=24)
    params = {"train": short, "eval": long}
    return world.start(worker=worker, params=params, context_tokens=640, **changes)


@pytest.fixture(scope="module")
def alone(model: tuple[PolicyStore, str, Path]) -> Trajectory:
    """Request that nothing interrupted."""
    world = _world(model)
    calm = _start(world, "calm")
    world.decide(world.place(calm, 0, purpose="eval"))
    world.until_idle(calm)
    trajectory = world.trajectory(world.facts(TrajectoryLogged)[-1])
    assert trajectory.sampled == LONG
    return trajectory


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def test_worker_killed_at_token_200_goes_on_elsewhere_with_the_same_tokens(
    model: tuple[PolicyStore, str, Path], alone: Trajectory
) -> None:
    world = _world(model)
    victim = _start(world, "victim", checkpoint_tokens=CHECKPOINT_TOKENS)
    world.decide(world.place(victim, 0, purpose="eval"))
    world.until(victim, lambda: victim.engine.kv_used_tokens >= KILLED_AT + 3)
    resume = victim.machine.requests.progress()["e0000000000-000"]
    other = _start(world, "other")
    world.decide(world.place(other, 0, purpose="eval", attempt=2, resume=resume))
    world.until_idle(other)
    trajectory = world.trajectory(world.facts(TrajectoryLogged)[-1])
    prompt_tokens, prefilled = trajectory.meta.prefills
    assert prompt_tokens == trajectory.meta.prompt_tokens
    assert prefilled - prompt_tokens == resume.tokens >= KILLED_AT - CHECKPOINT_TOKENS
    assert trajectory.token_ids == alone.token_ids
    assert _numbers(trajectory.logprobs) == pytest.approx(_numbers(alone.logprobs), abs=1e-4)
    model_segments = [segment for segment in trajectory.segments if segment.kind == "model"]
    assert [segment.worker for segment in model_segments] == ["victim", "other"]


@pytest.mark.parametrize("kept", [True, False], ids=["with its cache", "prefilled"])
def test_request_moved_into_a_running_batch_has_the_very_bits_of_one_that_stayed(
    model: tuple[PolicyStore, str, Path], alone: Trajectory, kept: bool, tmp_path: Path
) -> None:
    handover = KvHandover(MappedFiles(tmp_path, clock=VirtualClock())) if kept else NoHandover()
    world = _world(model, handover=handover)
    source, target = _start(world, "source"), _start(world, "target", slots=16, prefetch=4)
    request = world.place(source, 0, purpose="eval")
    crowd = [world.place(target, number, purpose="eval") for number in range(1, 9)]
    world.decide(request, world.place(source, 20), world.place(source, 21), *crowd)
    world.until(source, lambda: source.engine.kv_used_tokens >= KILLED_AT)
    world.ticks(target, 5)
    world.decide(world.move(request, target))
    world.until(source, lambda: bool(world.facts(RequestReleased)))
    (released,) = world.facts(RequestReleased)
    assert released.resume is not None and (released.kv is not None) == kept
    again = world.place(target, 0, purpose="eval", attempt=2, resume=released.resume)
    world.decide(msgspec.structs.replace(again, kv=released.kv))
    world.until_idle(target)
    name = alone.trajectory
    (logged,) = [fact for fact in world.facts(TrajectoryLogged) if fact.trajectory == name]
    trajectory = world.trajectory(logged)
    assert trajectory.token_ids == alone.token_ids
    assert trajectory.logprobs == alone.logprobs
    assert trajectory.sampler_logprobs == alone.sampler_logprobs
    assert trajectory.meta.migrations == kept and len(trajectory.meta.prefills) == 2 - kept
    assert target.counts["KV caches imported"] == kept
    assert list(tmp_path.iterdir()) == []


def test_episodes_behind_kept_prefixes_are_recorded_as_if_all_had_been_prefilled(
    model: tuple[PolicyStore, str, Path],
) -> None:
    result, statuses = [], []
    for prefix_cache_ratio in (0.0, 1.0):
        world = _world(model, prefix_cache_ratio=prefix_cache_ratio)
        tasks = InlineTasks(episodes=True, prompt=_prompt, step=_answer)
        params = SamplingParams(max_tokens=200, stop_ids=tuple(range(0, 100, 9)))
        worker = world.start(tasks=tasks, params={"train": params}, context_tokens=640)
        world.decide(*(world.place(worker, 0, sample) for sample in range(4)))
        world.until_idle(worker)
        world.ticks(worker, HEARTBEAT_NS // TICK_NS + 1)
        logged = sorted(world.facts(TrajectoryLogged), key=lambda value: value.trajectory)
        result.append([world.trajectory(fact) for fact in logged])
        statuses.append(world.statuses()[-1])
    for plain, keeping in zip(*result, strict=True):
        assert len(plain.meta.prefills) > 1
        assert keeping.meta.prefills == plain.meta.prefills
        assert keeping.token_ids == plain.token_ids
        assert keeping.logprobs == plain.logprobs
    plain_status, keeping_status = statuses
    assert plain_status.prompt_tokens_reused == 0
    assert keeping_status.prompt_tokens_reused > keeping_status.prompt_tokens_computed > 0
    spent = keeping_status.prompt_tokens_reused + keeping_status.prompt_tokens_computed
    assert spent == plain_status.prompt_tokens_computed


def _prompt(call: PromptCall) -> PromptReady:
    return PromptReady(request=call.request, text="5 6 7 " * 20, episode=True)


def _answer(call: EnvStep) -> EnvObserved:
    return EnvObserved(request=call.request, text="9 8 7", done=False, tool="", ok=True)

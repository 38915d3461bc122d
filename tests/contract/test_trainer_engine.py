"""Engine and trainer agree on a policy: what one samples, the other finds as likely."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dora_pipe.consumers.learners.learner import Learner, TrainBatch, TrainGroup
from dora_pipe.consumers.learners.torch.learner import TorchLearner, TorchOptions
from dora_pipe.consumers.learners.torch.lora import LoraOptions
from dora_pipe.producers.engines.engine import (
    UNASSIGNED_LEFT_OUT,
    Engine,
    EngineRequest,
    SamplingParams,
    TokensSampled,
)
from dora_pipe.producers.engines.torch.engine import TorchEngine
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.store.model_dir import import_model, unassigned_ids
from dora_pipe.store.store import PolicyStore
from tests.support import deepspeed, device
from tests.support.adapters import LAYERS, RANK
from tests.support.batches import SETTINGS, make_trajectory
from tests.support.models import EOS_ID, make_glm4_moe, make_llama_gqa, make_qwen2
from tests.support.vllm_servers import BUILDERS, need_vllm, open_shared

RATIO_DISTANCE_MAX = {"float32": 1e-4, "bfloat16": 0.05}
"""How far a ratio may lie from 1 on the policy that sampled the trajectory, by vLLM's type: the
trainer's log-probs are float32's."""

LORA = LoraOptions(rank=RANK, alpha=8.0, targets=LAYERS)

PROMPT = [5, 9, 14, 21]
SLOW = (pytest.mark.slow, pytest.mark.pure)


def _torch(model_dir: Path) -> Engine:
    return TorchEngine.open(model_dir, slots=16, context_tokens=128, threads=1)


def _vllm(model_dir: Path, kind: str = "qwen2") -> Engine:
    need_vllm()
    return open_shared(slots=16, context_tokens=128, kind=kind)


def _vllm_padded(model_dir: Path) -> Engine:
    return _vllm(model_dir, "padded")


def _vllm_mixture(model_dir: Path) -> Engine:
    return _vllm(model_dir, "qwen3_moe")


_padded, _mixture = BUILDERS["padded"], BUILDERS["qwen3_moe"]


def _serving(model_dir: Path) -> Engine:
    return TorchEngine.open(
        model_dir, slots=16, context_tokens=128, threads=1, lora_rank=RANK, max_resident_versions=2
    )


def _trainer(
    kind: str, assets: Path, reference: Path, root: Path, lora: LoraOptions | None = None
) -> Learner:
    if kind == "torch":
        device.prepare()
        options = TorchOptions(device=device.DEVICE, lora=lora)
        return TorchLearner(assets, reference=reference, options=options)
    deepspeed.need_deepspeed()
    log = deepspeed.BatchLog(root / "log.sqlite")
    return deepspeed.make_learner(assets, reference, log, micro_batch_tokens=16384, lora=lora)


@pytest.mark.parametrize("kind", ["torch", "deepspeed"])
@pytest.mark.parametrize(
    ("make_model", "open_engine"),
    [
        pytest.param(make_qwen2, _torch, id="qwen2-torch"),
        pytest.param(_padded, _vllm_padded, id="padded-vllm"),
        pytest.param(_padded, _serving, id="padded-lora"),
        pytest.param(make_llama_gqa, _serving, id="llama_gqa-lora"),
        pytest.param(make_glm4_moe, _serving, id="glm4_moe-lora"),
        pytest.param(make_qwen2, _vllm, id="qwen2-vllm"),
        pytest.param(_mixture, _vllm_mixture, id="qwen3_moe-vllm"),
        pytest.param(_padded, _torch, id="padded-torch", marks=SLOW),
        pytest.param(make_llama_gqa, _torch, id="llama_gqa-torch", marks=SLOW),
        pytest.param(make_glm4_moe, _torch, id="glm4_moe-torch", marks=SLOW),
    ],
)
def test_ratio_is_one_on_the_policy_that_sampled(
    make_model: Callable[..., Path],
    open_engine: Callable[[Path], Engine],
    kind: str,
    tmp_path: Path,
) -> None:
    ratio_max = RATIO_DISTANCE_MAX["float32" if open_engine is _torch else device.DTYPE]
    store = PolicyStore(tmp_path / "policies")
    policy, assets = import_model(store, make_model(tmp_path / "model"))
    weights = store.weights_path(policy.digest)
    lora = LORA if open_engine is _serving else None
    trainer = _trainer(kind, store.assets_path(assets), weights, tmp_path, lora)
    trainer.load(weights, digest=policy.digest, optimizer=None)
    # A step first: the engine must take what the trainer published, not what it was opened with.
    trainer.train(_batch(open_engine, store, assets, policy.digest, step=0), SETTINGS)
    digest = store.publish_weights(trainer.save_weights).digest
    assert digest != policy.digest
    batch = _batch(open_engine, store, assets, digest, step=1, first=policy.digest)
    metrics = trainer.train(batch, {**SETTINGS, "trainer.minibatches": 1}).metrics
    assert metrics["tokens"] > 300
    assert abs(metrics["ratio_min"] - 1) < ratio_max
    assert abs(metrics["ratio_max"] - 1) < ratio_max
    assert metrics["clipped_share"] == 0.0


def _batch(
    open_engine: Callable[[Path], Engine],
    store: PolicyStore,
    assets: str,
    digest: str,
    *,
    step: int,
    first: str = "",
) -> TrainBatch:
    engine = open_engine(store.assets_path(assets))
    if step and open_engine is _serving:
        engine.load(store.weights_path(first), version=0, digest=first)
    engine.load(store.weights_path(digest), version=step, digest=digest)
    names = [
        trajectory_id(group_id("train", step * 4 + number), sample)
        for number in range(4)
        for sample in range(4)
    ]
    params = SamplingParams(max_tokens=60, stop_ids=(EOS_ID,))
    for index, name in enumerate(names):
        prompt = [*PROMPT, 30 + index // 4]
        engine.add(
            EngineRequest(request=name, token_ids=prompt, sampled=0, seed=index, params=params)
        )
    sampled: dict[str, list[int]] = {name: [] for name in names}
    logprobs: dict[str, list[float]] = {name: [] for name in names}
    while engine.active:
        for event in engine.step():
            if isinstance(event, TokensSampled):
                sampled[event.request] += event.token_ids
                logprobs[event.request] += event.logprobs
    engine.close()
    unassigned = unassigned_ids(store.assets_path(assets))
    assert set(unassigned).isdisjoint(entry for subset in sampled.values() for entry in subset)
    assert (UNASSIGNED_LEFT_OUT in engine.declares) == bool(unassigned)
    return TrainBatch(
        step=step,
        groups=[
            TrainGroup(
                group=name[:11],
                version=step,
                trajectories=[
                    make_trajectory(
                        name,
                        version=step,
                        prompt=[*PROMPT, 30 + index],
                        sampled=sampled[name],
                        logprobs=logprobs[name],
                        reward=float(len(sampled[name]) + sum(sampled[name]) % 7),
                    )
                    for name in names[4 * index : 4 * index + 4]
                ],
            )
            for index, name in enumerate(names[::4])
        ],
    )

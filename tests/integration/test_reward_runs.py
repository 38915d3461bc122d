"""Tests of a run with a judge and an exact reward, and of rescoring without the endpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from tests.support.judge_endpoint import Answer, completion, judge_endpoint
from tests.support.tidy import ROOT
from tests.support.user_run import assert_clean, call, call_here, furnish

pytest.importorskip("torch")

SMALL = (
    *("run.steps=2", "rollout.group_size=4", "rollout.prompts_per_step=2", "evaluation.prompts=4"),
    *("workers.count=1", "workers.max_num_seqs=16", "sampling.max_tokens=8"),
    *("timing.heartbeat_s=0.2", "timing.lease_s=5.0", "trainer.minibatches=1"),
)


@pytest.mark.slow
def test_a_run_with_a_judge_learns_from_it_and_its_rewards_are_asked_again_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opinion(number: int, prompt: str) -> Answer:
        return (429, b"busy") if number == 0 else completion(f"So.\nScore: {len(prompt) % 11}")

    directory = furnish(tmp_path)
    monkeypatch.setenv("DORA_PIPE_CACHE", str(tmp_path / "cache"))
    example = str(ROOT / "examples" / "judge" / "config.toml")
    overrides = [word for override in (*SMALL, "model.path=model") for word in ("-o", override)]
    with judge_endpoint(opinion) as endpoint:
        monkeypatch.setenv("JUDGE_URL", endpoint.url)
        assert call(directory, "run", example, *overrides) == 0, (directory / "said").read_text()
    assert_clean(directory, "judge")
    asked = len(endpoint.asked)
    assert asked > 8
    assert "A student was asked: turn " in endpoint.asked[0]["messages"][0]["content"]
    with opened(str(directory / "runs" / "judge")) as run:
        records = records_of(run.bus, ends_of(run.bus, run.topics.trajectories))
        trajectories = [decode_trajectory(record.value) for record in records]
    scored = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    assert scored == trajectories
    for trajectory in scored:
        parts = trajectory.meta.reward_parts
        assert trajectory.reward == parts["judge"] + 0.5 * parts["exact"]
        assert trajectory.meta.reward_raw == parts["judge"]
    assert call_here(directory, "rescore", "judge") == 0, (directory / "said").read_text()
    assert (
        f"{len(trajectories)} of {len(trajectories)} trajectories as recorded"
        in (directory / "said").read_text()
    )
    assert len(endpoint.asked) == asked

"""Runs with other objectives than GRPO: they hold, and their steps come out bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from dora_pipe.audit.audit import audit
from dora_pipe.audit.replay_step import StepLine, replay
from dora_pipe.cli import main
from dora_pipe.config.load import dump_toml
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.schemas.control import StepCommitted
from tests.support.cluster import Cluster, make_config
from tests.support.cluster_parts import TorchParts
from tests.support.models import make_qwen2

STEPS = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A finished run that recomputes log-probs, updates twice per step, and lost its trainer."""
    folder = tmp_path_factory.mktemp("objective")
    config = make_config(
        run__steps=STEPS,
        run__name="tis",
        sampling__max_tokens=24,
        sampling__temperature=1.3,
        objective__kind="tis",
        objective__level="sequence",
        objective__mask="token",
        objective__advantage="version-baseline",
        trainer__minibatches=2,
        trainer__checkpoint_every=2,
    )
    parts = TorchParts(make_qwen2(folder / "model"))
    with Cluster(folder / "run", config, parts=parts, workers=("w0", "w1")) as running:
        running.until(lambda: running.version >= 1)
        running.restart("trainer")
        running.run()
        (running.path.parent / "config.toml").write_text(dump_toml(running.config))
        yield running


def commits_of(cluster: Cluster) -> list[StepCommitted]:
    history = read_history(cluster.bus, cluster.topics, cluster.clock)
    return list(read_commits(cluster.bus, cluster.topics, history.notes, cluster.clock))


def again(cluster: Cluster, first: int = 0, **changed: str) -> list[StepLine]:
    reference = cluster.store.weights_path(cluster.run_started.policy.digest)
    lines = replay(
        cluster.bus,
        cluster.topics,
        cluster.store.root,
        cluster.parts.trainer(cluster.assets, reference, cluster.config),
        first=first,
        last=STEPS,
        clock=cluster.clock,
        changed={f"objective.{name}": value for name, value in changed.items()},
    )
    return list(lines)


def test_run_with_another_objective_holds(cluster: Cluster) -> None:
    report = audit(cluster.bus, cluster.topics, cluster.store.root)
    assert report.holds, [violation.line for violation in report.violations]
    assert report.steps == STEPS


def test_steps_with_recomputed_log_probs_come_out_bit_for_bit(cluster: Cluster) -> None:
    lines = again(cluster)
    assert [line.replayed.equal for line in lines] == [True] * STEPS
    assert len({line.replayed.digest_replayed for line in lines}) == STEPS


def test_commit_says_which_objective_it_was_and_what_it_weighed(cluster: Cluster) -> None:
    for commit in commits_of(cluster):
        assert commit.settings["objective.kind"] == "tis"
        assert commit.settings["objective.proximal"] == "recomputed"
        assert commit.figures["weight_mean"] > 0
        path = cluster.store.verify_blob("contributions", commit.contributions.sha256)
        trained = [row for row in read_contributions(path) if row["ratio_mean"] is not None]
        assert trained
        assert all(row["weight_mean"] is not None for row in trained)
        assert all(0 <= row["masked_share"] <= 1 for row in trained)


def test_step_trained_again_with_another_objective_gives_other_weights(cluster: Cluster) -> None:
    lines = again(cluster, kind="topr")
    assert [line.replayed.equal for line in lines] == [False]
    assert lines[0].replayed.step == 0


def test_mismatch_of_a_step_is_split_by_its_causes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["dora-pipe", "mismatch", str(cluster.path.parent), *args])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    code, out = call("--json")
    found = json.loads(out)
    commit = commits_of(cluster)[-1]
    assert (code, found["step"]) == (0, STEPS - 1)
    assert found["trajectories"] == sum(len(group.trajectories) for group in commit.groups)
    causes = found["causes"]
    # The engine's log-probs are the trainer's but for float32, both at temperature 1.3; nothing is
    # cut off the distribution.
    assert causes["numerics"]["largest"] < 1e-4
    assert causes["sampling"]["size"] < 1e-6
    assert sum(causes[one]["share"] for one in ("staleness", "numerics", "sampling")) == (
        pytest.approx(1.0)
    )
    ages = {STEPS - 1 - group.version for group in commit.groups}
    assert {int(age) for age in found["by_staleness"]} == ages
    stale = [one["largest"] for age, one in found["by_staleness"].items() if int(age)]
    assert stale
    assert min(stale) > 1e-4
    assert found["tokenisation"]["trajectories"] == found["trajectories"]

    code, out = call("--step", "0")
    assert code == 0
    assert out.startswith("Step 0: log ratios of ")
    assert "tokenisation: 0 of " in out
    code, _ = call("--step", "99")
    assert code == 2

"""Runs with other objectives than GRPO, a user's own too: they hold, and their steps come out bit
for bit."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.analysis.replay import StepResult, raise_if_diverged
from dora_pipe.cli import main
from dora_pipe.config.load import dump_toml
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.core.errors import ReplayDiverged
from dora_pipe.schemas.control import StepCommitted
from tests.support.cluster import Cluster, TorchParts, make_config
from tests.support.models import make_qwen2

STEPS = 3
GUIDE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("objective")
    config = make_config(
        run__steps=STEPS,
        run__name="tis",
        sampling__max_tokens=24,
        sampling__temperature=1.3,
        rollout__prompts_per_step=2,
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


def again(
    cluster: Cluster, first: int = 0, last: int = STEPS, **changed: str | float
) -> list[StepResult]:
    return cluster.replayed(
        first, last, {f"objective.{name}": value for name, value in changed.items()}
    )


def test_run_with_another_objective_holds(cluster: Cluster) -> None:
    assert cluster.clean_report().steps == STEPS


def test_steps_with_recomputed_log_probs_come_out_bit_for_bit(cluster: Cluster) -> None:
    lines = again(cluster)
    assert [line.replayed.equal for line in lines] == [True] * STEPS
    assert len({line.replayed.digest_replayed for line in lines}) == STEPS


def test_commit_says_which_objective_it_was_and_what_it_weighed(cluster: Cluster) -> None:
    for commit in cluster.facts(StepCommitted):
        assert commit.settings["objective.kind"] == "tis"
        assert commit.settings["objective.proximal"] == "recomputed"
        assert commit.metrics["weight_mean"] > 0
        path = cluster.store.verify_blob("contributions", commit.contributions.sha256)
        trained = [row for row in read_contributions(path) if row["ratio_mean"] is not None]
        assert trained
        assert all(row["weight_mean"] is not None for row in trained)
        assert all(0 <= row["masked_share"] <= 1 for row in trained)


def test_step_trained_again_with_another_objective_gives_other_weights(cluster: Cluster) -> None:
    lines = again(cluster, kind="topr")
    assert [line.replayed.equal for line in lines] == [False] * STEPS


def test_mismatch_of_a_step_is_split_by_its_causes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*args: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["dora-pipe", "mismatch", str(cluster.path.parent), *args])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    code, out = call("--json")
    result = json.loads(out)
    commit = cluster.facts(StepCommitted)[-1]
    assert (code, result["step"]) == (0, STEPS - 1)
    assert result["trajectories"] == sum(len(group.trajectories) for group in commit.groups)
    causes = result["causes"]
    # The engine's log-probs are the trainer's but for float32, both at temperature 1.3; nothing is
    # cut off the distribution.
    assert causes["numerics"]["largest"] < 1e-4
    assert causes["sampling"]["size"] < 1e-6
    assert sum(causes[entry]["share"] for entry in ("staleness", "numerics", "sampling")) == (
        pytest.approx(1.0)
    )
    ages = {STEPS - 1 - group.version for group in commit.groups}
    assert {int(age) for age in result["by_staleness"]} == ages
    stale = [row["largest"] for age, row in result["by_staleness"].items() if int(age)]
    assert stale
    assert min(stale) > 1e-4
    assert result["tokenization"]["trajectories"] == result["trajectories"]

    code, out = call("--step", "0")
    assert code == 0
    assert out.startswith("Step 0: log ratios of ")
    assert "tokenization: 0 of " in out
    code, _ = call("--step", "99")
    assert code == 2


# An objective of a user's own.


def write_own(folder: Path, constant: str = "4") -> None:
    (block,) = re.findall(r"```python\n(# sapo.py.*?)```", GUIDE.read_text(), re.DOTALL)
    (folder / "sapo.py").write_text(block.replace("gate = 4 /", f"gate = {constant} /"))
    sys.modules.pop("sapo", None)
    importlib.invalidate_caches()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    write_own(tmp_path)
    config = make_config(
        run__steps=STEPS,
        run__name="own",
        sampling__max_tokens=12,
        rollout__prompts_per_step=2,
        task__directory=str(tmp_path),
        objective__kind="sapo:SAPO",
        objective__mask="token",
        objective__options={"tau_good": 2.0},
        trainer__minibatches=2,
        trainer__checkpoint_every=2,
    )
    parts = TorchParts(make_qwen2(tmp_path / "model"))
    with Cluster(tmp_path / "run", config, parts=parts, workers=("w0",)) as running:
        running.until(lambda: running.version >= 1)
        running.restart("trainer")
        running.run()
        yield running


def test_run_with_an_objective_of_ones_own_holds_and_is_repeated_from_its_source_alone(
    own: Cluster, tmp_path: Path
) -> None:
    own.clean_report()
    source = hashlib.sha256((tmp_path / "sapo.py").read_bytes()).hexdigest()
    for commit in own.facts(StepCommitted):
        assert commit.settings["objective.options.tau_good"] == 2.0
        assert commit.numerics["objective source"] == f"sapo:SAPO {source}"
        assert commit.metrics["grad_norm"] > 0
    assert [line.replayed.equal for line in again(own)] == [True] * STEPS
    write_own(tmp_path, "3")
    first = again(own)[0]
    assert not first.replayed.equal
    assert first.replayed.other_numerics == ["objective source"]
    with pytest.raises(ReplayDiverged, match="numerics differ in objective source"):
        raise_if_diverged(first)

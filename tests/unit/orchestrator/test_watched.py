"""Tests of the watched evaluation: best version and early stop."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.export import best_version, logged_versions
from dora_pipe.cli import export, main
from dora_pipe.config.load import dump_toml
from dora_pipe.config.model import Evaluation
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.errors import ConfigError, InvariantBroken, PolicyError
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.orchestrator.apply_decision import apply_decision, pinned
from dora_pipe.orchestrator.watched import Watched, begun, ended
from dora_pipe.schemas.rounds import EarlyStop, TakeBatch
from dora_pipe.schemas.topics import Topics
from tests.support.catalogue_stage import CatalogueStage
from tests.support.cluster import ORCHESTRATOR, Cluster
from tests.support.cluster import make_config as cluster_config
from tests.support.configs import small_config
from tests.support.orchestrator_records import make_config
from tests.support.orchestrator_stage import Stage, unchanged

GROUPS = 2
REWARDS = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=2), min_size=GROUPS, max_size=GROUPS
)


def watch_rewards(order: Sequence[tuple[int, Sequence[float]]], versions: int) -> Watched:
    watched = Watched()
    for version in range(versions):
        watched = begun(watched, version)
    for version, rewards in order:
        watched = ended(watched, version, rewards, groups=GROUPS)
    return watched


@given(st.lists(REWARDS, min_size=1, max_size=6), st.integers(0, 2**32))
def test_best_is_the_first_of_the_highest_whatever_order_groups_end_in(
    versions: list[list[list[float]]], seed: int
) -> None:
    means = [
        sum(map(sum, groups)) / count if (count := sum(map(len, groups))) else None
        for groups in versions
    ]
    ends = [(index, group) for index, groups in enumerate(versions) for group in groups]
    Random(seed).shuffle(ends)
    watched = watch_rewards(ends, len(versions))
    earlier_means = [mean for mean in means if mean is not None]
    best = means.index(max(earlier_means)) if earlier_means else -1
    assert (watched.open, watched.best) == ((), best)
    assert watched.waited == len(versions) - 1 - best
    if earlier_means:
        assert watched.reward == max(earlier_means)


# In the fold.

FALLING: Mapping[int, float] = {0: 0.2, 1: 0.6, 2: 0.6, 3: 0.4}


def watching(**changes: Any) -> Stage:
    settings = {
        "run__steps": 20,
        "evaluation__prompts": GROUPS,
        "evaluation__every": 1,
        "evaluation__best": True,
        **changes,
    }
    stage = Stage(**settings).begin()
    stage.worker("w0", slots=6)
    return stage


def step(stage: Stage) -> None:
    while names := stage.running():
        for name in names:
            spec = stage.state.groups[name.rpartition("-")[0]].spec
            reward = FALLING.get(spec.version, 0.1) if spec.purpose == "eval" else 1.0
            stage.finish(name, reward=reward)
        stage.settle()
    if stage.state.training is not None:
        stage.commit()
    stage.settle()


def test_run_ends_early_by_a_decision_with_its_reason_and_keeps_the_best() -> None:
    stage = watching(evaluation__patience=3)
    while not stage.state.done:
        step(stage)
    stops = [decision for decision in stage.decided if isinstance(decision, EarlyStop)]
    assert len(stops) == 1 and stops[0].best == 1
    assert "not better than that of version 1, 0.6" in stops[0].reason
    assert 4 <= stage.state.version < 10
    assert stage.state.watched is not None and stage.state.watched.best == 1
    assert 1 in pinned(stage.state)


def test_batches_pin_the_best_version_only_where_it_is_asked_for() -> None:
    for best, expected in ((True, {1}), (False, set())):
        stage = watching(evaluation__best=best, evaluation__patience=10)
        for _ in range(8):
            step(stage)
        batch = [decision for decision in stage.decided if isinstance(decision, TakeBatch)][-1]
        assert {1} & set(batch.pins) == expected


@pytest.mark.parametrize("orders", [((0, 1, 2), (2, 1, 0)), ((2, 1, 0), (0, 1, 2))])
def test_catalogue_finds_the_same_best_where_only_the_order_of_sums_differs(
    orders: tuple[tuple[int, ...], ...],
) -> None:
    stage, rewards = CatalogueStage(), (0.1, 0.2, 0.3)
    incarnation, watched = stage.worker(), Watched()
    for version, order in enumerate(orders):
        watched = begun(watched, version)
        specs = [stage.group(3 * version + index, version, "eval") for index in range(3)]
        for position in order:
            stage.place(specs[position], incarnation)
            stage.log(
                specs[position],
                incarnation,
                rewards=(rewards[position], None),
                offset=1 + 10 * (3 * version + position),
            )
            stage.end(specs[position], "evaluated")
            watched = ended(watched, version, [rewards[position]], groups=3)
    config = make_config(evaluation__best=True, evaluation__prompts=3, evaluation__every=1)
    assert best_version(stage.catalogue, config) == (watched.best, watched.reward)
    logged = logged_versions(stage.catalogue, "")
    assert logged[0][0] == watched.best
    assert [reward for _, reward in logged] == sorted((entry for _, entry in logged), reverse=True)
    assert watched.best == (0 if orders[0][0] == 0 else 1)


def test_stop_that_is_not_due_is_refused_and_changes_nothing() -> None:
    stage = watching(evaluation__patience=3)
    step(stage)
    before = stage.copy()
    with pytest.raises(InvariantBroken, match="has another wait"):
        apply_decision(stage.state, EarlyStop(evaluation="", best=0, reason="enough"))
    assert unchanged(before, stage.state)


def test_whole_run_ends_early_its_audit_holds_and_the_best_version_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = cluster_config(
        run__steps=40,
        evaluation__prompts=2,
        evaluation__every=1,
        evaluation__best=True,
        evaluation__patience=2,
        store__keep_every=2,
    )
    with Cluster(tmp_path, config) as cluster:
        watcheds: list[Watched] = []

        def watch() -> bool:
            watched = cluster.roles[ORCHESTRATOR].machine.state.watched
            watcheds.append(watched or Watched())
            return watcheds[-1].stopped

        cluster.until(watch)
        cluster.run()
        report = audit(cluster.bus, cluster.topics, cluster.store)
        assert report.holds, [violation.line for violation in report.violations]
        assert 4 <= report.steps < 40
        with closing(read_catalogue(cluster.bus, cluster.topics)) as tables:
            best = best_version(tables, cluster.config)
        assert best is not None and best[1] >= watcheds[-1].reward
        history = read_history(cluster.bus, cluster.topics, cluster.clock)
        assert cluster.store.has_weights(history.digest_of(watcheds[-1].best))
        (cluster.path.parent / "config.toml").write_text(dump_toml(cluster.config))

    def call(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dora-pipe", *args])
        with pytest.raises(SystemExit, match="0"):
            main.main()
        return capsys.readouterr().out

    shown = json.loads(call("show", str(cluster.path.parent), "--json"))
    assert shown["best"]["version"] == best[0]


# The keys.


@pytest.mark.parametrize(
    ("evaluations", "key"),
    [
        ([{"best": True}], "evaluation.best"),
        ([{"patience": 2, "every": 4, "prompts": 0}], "evaluation.patience"),
        (
            [{"name": "one", "every": 1, "best": True}, {"name": "two", "every": 1, "patience": 3}],
            "evaluation.two.patience",
        ),
    ],
)
def test_keys_that_watch_nothing_or_two_evaluations_are_refused(
    evaluations: list[dict[str, Any]], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: ") as raised:
        small_config(evaluation=evaluations[0], more_evaluations=evaluations[1:])
    assert raised.value.hint


@pytest.mark.parametrize("kept", [True, False])
def test_best_is_named_with_the_evaluation_that_decides_it(
    kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights(version: int) -> None:
        if not kept:
            raise PolicyError("its file is gone")

    hard = Evaluation(name="hard", best=True)
    config = replace(make_config(evaluation__name="easy"), more_evaluations=(hard,))
    run: Any = SimpleNamespace(
        config=config, topics=Topics("r"), tables=lambda: SimpleNamespace(close=lambda: None)
    )
    monkeypatch.setattr(export, "best_version", lambda *_: (3, 0.5))
    monkeypatch.setattr(export, "rebuilder", lambda _: SimpleNamespace(weights=weights))
    if kept:
        assert export.version_of(run, "best") == 3
        assert "version 3, 0.500 in evaluation hard" in capsys.readouterr().err
    else:
        with pytest.raises(PolicyError, match="no evaluated version has its weights left"):
            export.version_of(run, "best")

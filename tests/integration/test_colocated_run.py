"""A run on a real model whose second worker sleeps while a step is computed: audited, bit for bit
again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.replay_trajectory import pick, regenerate
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.producers.worker.role import sampling_params
from tests.support.cluster import Cluster, TorchParts, make_config
from tests.support.ledgers import build_ledger
from tests.support.models import make_llama_gqa

STEPS = 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("colocated")
    config = make_config(
        run__steps=STEPS,
        run__name="colocated",
        sampling__max_tokens=12,
        rollout__group_size=2,
        rollout__prompts_per_step=2,
        trainer__learning_rate=1e-4,
        evaluation__every=0,
        workers__count=2,
        workers__colocated=1,
        workers__max_num_seqs=2,
    )
    parts = TorchParts(make_llama_gqa(folder / "model", scale=20.0))
    with Cluster(folder / "run", config, parts=parts, workers=("w0", "w1")) as running:
        running.run()
        yield running


def test_it_sleeps_for_every_step_and_the_audit_is_clean(cluster: Cluster) -> None:
    report = audit(cluster.bus, cluster.topics, cluster.store.root)
    assert report.holds, [violation.line for violation in report.violations]
    ledger = build_ledger(cluster.bus, cluster.topics)
    colocated = [worker.joined.colocated for worker in ledger.accounts.workers.values()]
    assert sorted(colocated) == [False, True]
    with closing(read_catalogue(cluster.bus, cluster.topics)) as tables:
        sql = "select count(*) from served_versions where worker = 'w1' and version = -1"
        (rows,) = tables.query(sql)
    assert rows[0] >= 1


def test_steps_and_trajectories_come_out_bit_for_bit(cluster: Cluster) -> None:
    lines = cluster.replayed(0, STEPS)
    assert [line.replayed.step for line in lines] == list(range(STEPS))
    stop_ids = cluster.parts.stop_ids(cluster.assets)
    config = cluster.config
    params = {
        "train": sampling_params(config.sampling, stop_ids),
        "eval": sampling_params(config.eval_sampling(), stop_ids),
    }
    engine = cluster.parts.engine(cluster.assets, cluster.config, cluster.clock)
    bus, topics, store = cluster.bus, cluster.topics, cluster.store.root
    with closing(read_catalogue(bus, topics)) as tables:
        results = list(
            regenerate(bus, topics, store, tables, engine, list(pick(tables, 6, 5)), params)
        )
    assert len(results) == 6 and all(result.equal for result in results)

"""A trainer over two nodes of a Slurm job, one rank on each; srun and scontrol are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.control import StepCommitted
from infra.kafka.broker import KafkaBroker
from tests.support.slurm_job import SlurmJob
from tests.support.user_run import facts_of

pytestmark = [pytest.mark.kafka]

LIMIT_S = 600.0


def test_trainer_of_two_nodes_trains_a_whole_run(tmp_path: Path) -> None:
    job = SlurmJob(tmp_path, nodes=3, TRAINER_NODES="2", TRAINER_RANKS="1", WORKERS_PER_NODE="2")
    words = ["-o", 'trainer.kind="deepspeed"', "-o", "trainer.zero_stage=2"]
    with job.submitted(*words) as submitted:
        assert submitted.wait(LIMIT_S) == 0, job.said()
    assert not job.processes()
    with KafkaBroker(job.scratch / "kafka", port=job.port), opened(job.url) as run:
        report = audit(run.bus, run.topics, job.folder / "store")
        assert not report.violations_total, report
        commits = [one for one in facts_of(job.url) if isinstance(one, StepCommitted)]
    assert {one.numerics["world_size"] for one in commits} == {"2"}

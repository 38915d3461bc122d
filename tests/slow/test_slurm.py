"""A run as one Slurm job; srun and scontrol are stand-ins, all else is real."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.launch.run_dir import opened
from dora_pipe.schemas.control import StepCommitted, WorkerJoined
from infra.kafka.broker import KafkaBroker
from tests.support.slurm_job import NODES, SlurmJob
from tests.support.user_run import facts_of, until

pytest.importorskip("torch")
pytestmark = [pytest.mark.kafka, pytest.mark.slow]

LIMIT_S = 300.0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SlurmJob]:
    job = SlurmJob(tmp_path, WORKERS_PER_NODE="2")
    yield job
    assert not job.processes(), "a job leaves nobody behind"


def test_a_job_outlives_a_worker_and_being_requeued_and_leaves_a_whole_run(job: SlurmJob) -> None:
    def workers() -> list[int]:
        return job.processes("dora-pipe worker")

    with job.submitted("-o", "run.steps=12") as first:
        until(lambda: (job.scratch / "kafka.log").exists() and len(workers()) == 2)
        until(
            lambda: (
                len([event for event in facts_of(job.url) if isinstance(event, StepCommitted)]) >= 2
            )
        )
        killed = workers()[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(set(workers()) - {killed}) == 2)
    assert first.returncode == 143, job.output()
    assert "ended with 137 and is started again" in job.output()
    assert not job.processes()
    with job.submitted("-o", "run.steps=12") as again:
        assert again.wait(LIMIT_S) == 0, job.output()
    assert not job.processes()
    with KafkaBroker(job.scratch / "kafka", port=job.port), opened(job.url) as run:
        report = audit(run.bus, run.topics, job.folder / "store")
        assert not report.violations_total, report
        facts = facts_of(job.url)
    steps = [event.step for event in facts if isinstance(event, StepCommitted)]
    assert steps == [*range(12)]
    names = {f"{NODES[1]}-{local}".replace(".", "-") for local in (0, 1)}
    assert {event.worker for event in facts if isinstance(event, WorkerJoined)} == names


def test_a_wrong_configuration_ends_the_job_with_its_line_and_code(job: SlurmJob) -> None:
    with job.submitted("-o", "run.stepz=12") as ended:
        assert ended.wait(LIMIT_S) == 3, job.output()
    assert "did you mean" in job.output()


def test_a_job_without_a_node_for_workers_is_refused(tmp_path: Path) -> None:
    job = SlurmJob(tmp_path, TRAINER_NODES="2")
    with job.submitted() as ended:
        assert ended.wait(LIMIT_S) == 2
    assert "none is left for workers" in job.output()

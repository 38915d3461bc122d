"""A trainer over two nodes of a Slurm job, one rank on each; srun and scontrol are stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.schemas.control import RoleStarted, StepCommitted
from infra.kafka.broker import KafkaBroker
from tests.support.slurm_job import NODES, SlurmJob
from tests.support.user_run import facts_of, facts_on, until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

LIMIT_S = 400.0
WORDS = ("-o", 'trainer.kind="deepspeed"', "-o", "trainer.zero_stage=2")
STEPS = 6


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SlurmJob]:
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("no mount namespaces here: nodes cannot have disks of their own")
    variables = {"TRAINER_NODES": "2", "TRAINER_RANKS": "1", "WORKERS_PER_NODE": "1"}
    job = SlurmJob(tmp_path, nodes=3, apart=True, **variables)
    yield job
    assert not job.processes(), "a job leaves nobody behind"


def _commits(job: SlurmJob) -> list[int]:
    return [event.step for event in facts_of(job.url) if isinstance(event, StepCommitted)]


def _until_committed(job: SlurmJob, count: int) -> None:
    until(lambda: bool(job.processes("dora-pipe worker")), LIMIT_S)  # and so there is a broker
    until(lambda: len(_commits(job)) >= count, LIMIT_S)


def _second_node(job: SlurmJob) -> dict[int, str]:
    results = {pid: Path(f"/proc/{pid}/environ").read_text() for pid in job.processes()}
    return {
        pid: result for pid, result in results.items() if f"SLURMD_NODENAME={NODES[1]}\0" in result
    }


def _rank_1(job: SlurmJob) -> int:
    (result,) = [pid for pid, entry in _second_node(job).items() if "\0RANK=1\0" in entry]
    return result


@contextmanager
def _left(job: SlurmJob) -> Iterator[OpenRun]:
    with KafkaBroker(job.scratch / "kafka", port=job.port), opened(job.url) as run:
        yield run


def _assert_whole(job: SlurmJob, steps: int) -> int:
    with _left(job) as run:
        report = audit(run.bus, run.topics, run.policies)
        assert not report.violations_total, report
        facts = list(facts_on(run.bus, job.run))
        replayed = subprocess.run(
            [Path(sys.executable).parent / "dora-pipe", "replay", job.url, "--from", "0"],
            cwd=job.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("equal") >= steps
    commits = [event for event in facts if isinstance(event, StepCommitted)]
    assert [commit.step for commit in commits] == [*range(steps)]
    assert {commit.numerics["world_size"] for commit in commits} == {"2"}
    return sum(isinstance(event, RoleStarted) and event.role == "trainer" for event in facts)


def test_trainer_of_two_nodes_with_stores_of_their_own_trains_a_whole_run(job: SlurmJob) -> None:
    with job.submitted(*WORDS) as submitted:
        assert submitted.wait(LIMIT_S) == 0, job.output()
    assert _assert_whole(job, 3) == 1, job.output()


def test_a_rank_that_is_killed_in_a_step_costs_that_step_and_the_job_goes_on(job: SlurmJob) -> None:
    with job.submitted(*WORDS, "-o", f"run.steps={STEPS}") as submitted:
        _until_committed(job, 2)
        os.kill(_rank_1(job), signal.SIGKILL)
        assert submitted.wait(LIMIT_S) == 0, job.output()
    assert "rank 1 of the trainer was killed (SIGKILL)" in job.output()
    assert _assert_whole(job, STEPS) == 2, job.output()


def test_a_node_that_is_lost_ends_the_job_and_submitted_again_it_goes_on(job: SlurmJob) -> None:
    words = (*WORDS, "-o", f"run.steps={STEPS}")
    with job.submitted(*words) as submitted:
        _until_committed(job, 2)
        for pid in _second_node(job):
            os.kill(pid, signal.SIGKILL)
        assert submitted.wait(LIMIT_S) == 137, job.output()
    assert not job.processes()
    with job.submitted(*words) as again:
        assert again.wait(LIMIT_S) == 0, job.output()
    assert _assert_whole(job, STEPS) == 2, job.output()


def test_ranks_that_are_no_equal_shares_end_the_job_with_their_line(job: SlurmJob) -> None:
    with job.submitted(*WORDS, "-o", "trainer.ranks=3") as submitted:
        assert submitted.wait(LIMIT_S) == 3, job.output()
    assert "3 is not a multiple of 2 nodes" in job.output()

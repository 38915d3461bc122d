"""Tests of runs without a gradient: every reward raises, or all rewards are equal."""

from __future__ import annotations

from pathlib import Path

from dora_pipe.observe.progress import RunProgress
from dora_pipe.observe.why import why_now
from dora_pipe.orchestrator.process.recovery import recover
from dora_pipe.producers.tasks.calls import RewardCall, TaskEvent, TaskFailed
from dora_pipe.schemas.control import Command
from tests.support.cluster import ORCHESTRATOR, Cluster, make_config, reward_by_text
from tests.support.inline_tasks import InlineTasks
from tests.support.stats_stage import stats_of

TYPO = "KeyError: 'answr'"


def test_a_reward_with_a_typo_halts_the_run_which_goes_on_when_it_is_mended(tmp_path: Path) -> None:
    mended: list[bool] = []

    def reward(call: RewardCall) -> TaskEvent:
        if mended:
            return reward_by_text(call)
        return TaskFailed(request=call.request, error="KeyError", message="'answr'")

    config = make_config(run__steps=3)
    with Cluster(tmp_path, config, tasks=lambda: InlineTasks(reward=reward)) as cluster:
        cluster.until(lambda: ORCHESTRATOR not in cluster.roles)
        state = recover(cluster.bus, cluster.topics).state
        assert state.counters.outcomes["failed"] < 40
        assert TYPO in state.failures.halted
        assert not state.done
        assert stats_of(cluster.bus, cluster.topics).state.startswith("halted")

        answer = why_now(cluster.bus, cluster.topics, now_ns=cluster.clock.wall_ns())
        assert f"STOPPED: {state.failures.halted}" in [*answer.lines()][1]
        assert answer.alarms == ()
        later_ns = cluster.clock.wall_ns() + 60 * 10**9
        roles = why_now(cluster.bus, cluster.topics, now_ns=later_ns).roles
        assert [role.text for role in roles] == ["stopped with the run"] * 5
        assert [role.advice for role in roles] == [""] * 5, "none is to be started again"

        cluster.start(ORCHESTRATOR)
        cluster.until(lambda: ORCHESTRATOR not in cluster.roles)
        assert recover(cluster.bus, cluster.topics).state.failures.halted

        mended.append(True)
        cluster.tell(Command(at_ns=0, user="u", verb="resume"))
        cluster.start(ORCHESTRATOR)
        cluster.run()
        assert stats_of(cluster.bus, cluster.topics).state == "finished"
        assert cluster.clean_report().finished


def test_a_run_whose_groups_are_all_filtered_says_so_again_after_each_doubling(
    tmp_path: Path,
) -> None:
    config = make_config(run__steps=3, rollout__filter_zero_advantage=True)
    with Cluster(tmp_path, config, on_disk=False, tasks=InlineTasks) as cluster:
        progress = RunProgress(cluster.bus, cluster.topics)
        request: list[str] = []

        def twice() -> bool:
            request.extend(line for line in progress.lines() if line.startswith("no step"))
            return len(request) == 2

        cluster.until(twice)
        answer = why_now(cluster.bus, cluster.topics, now_ns=cluster.clock.wall_ns())
        open_groups = len(progress.account.open)
        progress.close()
    batches = 4 * config.rollout.prompts_per_step
    assert request == [
        f"no step after {count} groups: {count} filtered "
        f"(all valid rewards are equal: no advantage); every reward is 1 in {count} of them. If "
        "rewards never differ, rollout.filter_zero_advantage waits without end: change the reward "
        "or the data"
        for count in (batches, 2 * batches)
    ]
    assert answer.no_step.startswith(f"no step after {progress.outcomes['filtered']} groups: ")
    assert answer.halted == ""
    in_flight = config.rollout.prompts_per_step * (config.staleness.max_staleness + 1)
    assert open_groups <= in_flight, "what was filtered is not kept"

"""Grafana's dashboards as code: one table of panels, from which the JSON files are written.

    python -m infra.observe.dashboards

writes infra/observe/dashboards/*.json; a test compares them with what it would write, and another
one asks a real Prometheus every query. It decides which questions a dashboard answers; what each
query's metrics mean is in docs/reference/metrics.md.
"""

from __future__ import annotations

import sys
from typing import Final

from infra.observe.panels import (
    FOLDER,
    Dashboard,
    buckets,
    figures,
    lately,
    mean,
    panel,
    quantile,
    rate,
    share_ahead,
    stat,
)

REWARD: Final = panel(
    "Reward",
    "Mean valid reward of each step's batch and of its tasks, and of the newest complete "
    "evaluations; pass@k and maj@k.",
    ("dora_pipe_step_reward{RUN}", "{{run}} batch"),
    ("dora_pipe_step_task_reward{RUN}", "{{run}} {{task}} batch"),
    ("dora_pipe_evaluation_reward{RUN}", "{{run}} {{evaluation}} evaluation"),
    (
        'dora_pipe_evaluation_figure{RUN,figure=~"(pass|maj)@.*"}',
        "{{run}} {{evaluation}} {{figure}}",
    ),
)

STALENESS: Final = panel(
    "Staleness of trained groups",
    "Mean over the last five minutes and over the whole run, beside the bound.",
    (lately("staleness_steps"), "{{run}} mean of 5 min"),
    (mean("staleness_steps"), "{{run}} mean of the run"),
    ("dora_pipe_staleness_bound_steps{RUN}", "{{run}} bound"),
)

WAITS: Final = panel(
    "Who stands still",
    "How long each role has stood still, what for, and what that ends with; 0: it works.",
    ("dora_pipe_role_wait_seconds{RUN}", "{{role}}: {{wait}} <- {{blocker}}"),
    unit="s",
)

OVERVIEW: Final = Dashboard(
    name="overview",
    title="pipeline overview",
    panels=(
        stat("Version", "Committed steps.", "dora_pipe_policy_version{RUN}"),
        stat("Planned", "Steps as configured.", "dora_pipe_planned_steps{RUN}"),
        stat("Over", "1 once the run has stopped.", "dora_pipe_run_over{RUN}"),
        stat("Step", "Mean of the whole run.", mean("step_seconds"), "s"),
        stat("Tokens/s", "Sampled now, all workers.", rate("sampled_tokens_total")),
        stat("Alarms", "Waits beyond their limit.", "sum(dora_pipe_role_overdue_waits{RUN})"),
        REWARD,
        STALENESS,
        panel(
            "Workers by version",
            "Those that are there, by the version they host.",
            (
                'sum by (version) (dora_pipe_workers{RUN,state!~"left|fenced"} > 0)',
                "version {{version}}",
            ),
            stacked=True,
        ),
        WAITS,
        panel(
            "Where a step's time goes",
            "The trainer waited for its batch, and trained, per step.",
            (lately("trainer_wait_seconds"), "{{run}} waited"),
            (lately("step_training_seconds"), "{{run}} trained"),
            unit="s",
            stacked=True,
        ),
        panel(
            "Fates",
            "Groups that ended, per second.",
            (rate("groups_ended_total", by="fate"), "{{fate}}"),
            unit="ops",
            stacked=True,
        ),
    ),
)

VERSIONS: Final = Dashboard(
    name="staleness",
    title="staleness and versions",
    panels=(
        STALENESS,
        panel(
            "Staleness, every group",
            "Groups per staleness over time.",
            (buckets("staleness_steps"), "{{le}}"),
            kind="heatmap",
        ),
        stat("Bound", "max_staleness in force.", "dora_pipe_staleness_bound_steps{RUN}"),
        stat(
            "Beyond it",
            "Groups trained behind their deadline; none in a sound run.",
            "dora_pipe_groups_beyond_bound_total{RUN}",
        ),
        stat("90 % below", "Staleness, whole run.", quantile(0.9, "staleness_steps")),
        panel(
            "Version of each worker",
            "Which version every worker hosts.",
            ("dora_pipe_worker_version{RUN}", "{{worker}}"),
            kind="state-timeline",
        ),
        panel(
            "Workers by version and state",
            "Of those that are there.",
            (
                'sum by (version, state) (dora_pipe_workers{RUN,state!~"left|fenced"} > 0)',
                "version {{version}} {{state}}",
            ),
            stacked=True,
        ),
        panel(
            "Open groups",
            "Dispatched and not ended, beside requests without a place.",
            ("dora_pipe_open_groups{RUN}", "{{run}} {{purpose}}"),
            ("dora_pipe_queued_requests{RUN}", "{{run}} queued requests"),
        ),
        panel(
            "Mismatch by staleness",
            "Mean |ln ratio| of the newest step's trajectories, trained policy to sampler.",
            ("dora_pipe_step_logprob_mismatch{RUN}", "{{run}} staleness {{staleness}}"),
        ),
        panel(
            "Loading weights",
            "From an assignment to loaded and checked weights.",
            (quantile(0.5, "weights_load_seconds"), "{{run}} half below"),
            (quantile(0.95, "weights_load_seconds"), "{{run}} 95 % below"),
            unit="s",
        ),
    ),
)

TRAINER: Final = Dashboard(
    name="trainer",
    title="trainer",
    panels=(
        stat("Steps", "Committed.", "dora_pipe_steps_total{RUN}"),
        stat("Waited", "Mean per step, whole run.", mean("trainer_wait_seconds"), "s"),
        stat("Trained", "Mean per step, whole run.", mean("step_training_seconds"), "s"),
        stat("Refused", "Batches.", "dora_pipe_batches_refused_total{RUN}"),
        stat("Batch", "Sampled tokens of the newest.", "dora_pipe_step_tokens{RUN}"),
        stat(
            "Effective sample",
            "Share of the batch's trajectories that weigh.",
            "dora_pipe_step_effective_sample_ratio{RUN}",
            "percentunit",
        ),
        panel(
            "Whom the trainer waited for",
            "Seconds per second, by the worker whose trajectory came last.",
            (rate("trainer_waited_seconds_total", by="worker"), "{{worker}}"),
            unit="percentunit",
            stacked=True,
        ),
        panel(
            "Phase",
            "What the trainer does.",
            ("dora_pipe_trainer_phase{RUN}", "{{phase}}"),
            kind="state-timeline",
        ),
        REWARD,
        panel(
            "Parts of rewards",
            "Means of the newest step's batch, before weights.",
            ("dora_pipe_step_reward_part{RUN}", "{{run}} {{task}} {{part}}"),
        ),
        panel("Loss", "Of the newest step.", figures("loss")),
        panel("Gradient norm", "Of the newest step.", figures("grad_norm", "grad_norm_max")),
        panel(
            "Ratios",
            "Trained policy to sampler, over the tokens of the newest step.",
            figures("ratio_mean", "ratio_min", "ratio_max"),
        ),
        panel(
            "Clipped share and KL",
            "Of the newest step; the KL to the reference, and to a teacher where there is one.",
            figures("clipped_share", "kl", "teacher_kl"),
        ),
        panel(
            "Read ahead",
            "Trajectories in the trainer's cache.",
            ("dora_pipe_trainer_cached_records{RUN}", "{{run}}"),
        ),
        panel(
            "Compute",
            "Share of the time in forward, backward and update.",
            (rate("trainer_compute_seconds_total"), "{{run}}"),
            unit="percentunit",
        ),
        panel(
            "Trained ahead",
            "Share of training that was done in parts, before the batch was whole.",
            (share_ahead(), "{{run}}"),
            unit="percentunit",
        ),
        panel(
            "Size of the cache",
            "Bytes of these records.",
            ("dora_pipe_trainer_cached_bytes{RUN}", "{{run}}"),
            unit="bytes",
        ),
    ),
)

WORKERS: Final = Dashboard(
    name="workers",
    title="workers",
    panels=(
        panel(
            "Tokens per second",
            "Sampled, by worker.",
            (rate("sampled_tokens_total", by="worker"), "{{worker}}"),
            stacked=True,
        ),
        panel(
            "Tokens for values of turns",
            "Per second, of the steps that were committed; the workers' tokens have them too.",
            (rate("turn_value_tokens_total"), "{{run}}"),
        ),
        panel(
            "Prompt tokens reused",
            "Of those of prompts, what was not computed: equal beginnings were kept.",
            (
                rate("prompt_tokens_total", ',how="reused"', by="worker")
                + " / "
                + rate("prompt_tokens_total", by="worker"),
                "{{worker}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Episodes interrupted",
            "Environments that were lost: their episodes start again, or another one is told them.",
            (rate("episodes_interrupted_total", by="then"), "{{then}}"),
        ),
        panel(
            "Tasks that fail where they run",
            "Failures in a row of servers and processes that have not answered since, and what "
            "was tried; 1 where nothing is asked for now.",
            ("dora_pipe_task_place_failures{RUN}", "{{task}} {{place}} failures, {{worker}}"),
            ("dora_pipe_task_place_tries{RUN}", "{{task}} {{place}} tries, {{worker}}"),
            ("dora_pipe_task_place_left_alone{RUN}", "{{task}} {{place}} left alone, {{worker}}"),
        ),
        panel(
            "Slots in use",
            "Requests with a slot over slots.",
            (
                'dora_pipe_worker_requests{RUN,state="active"}'
                " / on (run, worker) dora_pipe_worker_slots{RUN}",
                "{{worker}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Requests that wait for a slot",
            "Placed ahead, by worker.",
            ('dora_pipe_worker_requests{RUN,state="waiting"}', "{{worker}}"),
        ),
        panel(
            "With their agents",
            "Sessions whose agents think, and calls that have no answer yet.",
            ('dora_pipe_worker_requests{RUN,state="agent"}', "{{worker}} agents"),
            ("dora_pipe_worker_calls_open{RUN}", "{{worker}} calls"),
        ),
        panel(
            "Oldest open call",
            "Since it came.",
            ("dora_pipe_worker_call_open_seconds{RUN}", "{{worker}}"),
            unit="s",
        ),
        panel(
            "KV cache in use",
            "Tokens over what fits.",
            (
                "dora_pipe_worker_kv_used_tokens{RUN}"
                " / on (run, worker) dora_pipe_worker_kv_capacity_tokens{RUN}",
                "{{worker}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Trajectories by how they ended",
            "Per second.",
            (rate("trajectories_total", by="finish, valid"), "{{finish}}, valid {{valid}}"),
            unit="ops",
            stacked=True,
        ),
        panel(
            "Trajectories without a valid reward",
            "Per second, by whose fault it is and class of error.",
            (rate("trajectories_invalid_total", by="fault, error"), "{{fault}}: {{error}}"),
            unit="ops",
            stacked=True,
        ),
        panel(
            "Length of trajectories",
            "Sampled tokens, over the whole run.",
            (quantile(0.5, "trajectory_tokens"), "{{run}} half below"),
            (quantile(0.95, "trajectory_tokens"), "{{run}} 95 % below"),
        ),
        panel(
            "Moves and lost workers",
            "Per second.",
            (rate("moves_total", by="stage"), "moves {{stage}}"),
            (rate("workers_lost_total", by="how"), "workers {{how}}"),
            unit="ops",
        ),
        panel(
            "Siblings that were not waited for",
            "Surplus ones, and those of groups that were open for too long, per second.",
            (rate("siblings_left_over_total", by="fate"), "{{fate}}"),
            unit="ops",
        ),
        panel(
            "How stays on workers ended",
            "Of groups that have ended, per second.",
            (rate("stays_ended_total", by="outcome"), "{{outcome}}"),
            unit="ops",
        ),
        WAITS,
        panel(
            "Memory",
            "Resident, by role.",
            ("dora_pipe_role_memory_bytes{RUN}", "{{role}}"),
            unit="bytes",
        ),
    ),
)

BUS: Final = Dashboard(
    name="bus",
    title="bus",
    panels=(
        panel(
            "Records per second",
            "By topic.",
            (rate("bus_records_total", by="topic"), "{{topic}}"),
            unit="ops",
        ),
        panel(
            "Bytes per second",
            "Of values, by topic.",
            (rate("bus_bytes_total", by="topic"), "{{topic}}"),
            unit="Bps",
        ),
        panel(
            "From a fact to the round that folds it",
            "Writing, the bus, reading.",
            (quantile(0.5, "control_delay_seconds"), "{{run}} half below"),
            (quantile(0.99, "control_delay_seconds"), "{{run}} 99 % below"),
            unit="s",
        ),
        panel(
            "The same over time",
            "Facts per delay.",
            (buckets("control_delay_seconds"), "{{le}}"),
            kind="heatmap",
            unit="s",
        ),
        panel(
            "Behind the end of the log",
            "Control positions that the orchestrator, and positions that these metrics lack.",
            ("dora_pipe_orchestrator_lag_positions{RUN}", "{{run}} orchestrator"),
            ("dora_pipe_exporter_lag_positions{RUN}", "metrics: {{topic}} {{partition}}"),
        ),
        panel(
            "CPU time on the bus",
            "Share of a core, by role.",
            (rate("role_cpu_seconds_total", ',part="bus"', by="role"), "{{role}}"),
            unit="percentunit",
        ),
        panel(
            "Rounds and decisions",
            "Per second.",
            (rate("rounds_total"), "{{run}} rounds"),
            (rate("decisions_total", by="kind"), "{{kind}}"),
            unit="ops",
        ),
        panel(
            "End of each partition",
            "Positions.",
            ("dora_pipe_bus_end_position{RUN}", "{{topic}} {{partition}}"),
        ),
        stat("Log", "1 while it can be read.", "dora_pipe_log_up{RUN}"),
        stat("Unreadable", "Records.", "sum(dora_pipe_bus_unreadable_records_total{RUN})"),
        stat(
            "Newest record",
            "Ago.",
            "time() - dora_pipe_last_record_timestamp_seconds{RUN}",
            "s",
        ),
    ),
)

DASHBOARDS: Final = (OVERVIEW, VERSIONS, TRAINER, WORKERS, BUS)


def main() -> None:
    """Write every file anew; files that no dashboard has are removed."""
    FOLDER.mkdir(exist_ok=True)
    wanted = {dashboard.path for dashboard in DASHBOARDS}
    for path in set(FOLDER.glob("*.json")) - wanted:
        path.unlink()
    for dashboard in DASHBOARDS:
        dashboard.path.write_text(dashboard.text())
        sys.stdout.write(f"{dashboard.path.name}: {len(dashboard.panels)} panels\n")


if __name__ == "__main__":
    main()

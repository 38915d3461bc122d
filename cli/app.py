"""The commands of `dora-pipe`, where each is defined, and what it does in a line."""

from __future__ import annotations

from typing import Final

from dora_pipe.cli.lazy import Panels, lazy_app

COMMANDS: Final[Panels] = {
    "Start": {
        "demo": ("cli.commands.start:demo", "Train a small model, kill a worker, audit, replay."),
        "init": ("cli.commands.start:init", "Make a folder with a configuration and a model."),
        "sft": ("cli.commands.start:sft", "Warm a model up on (prompt, answer) pairs."),
        "run": ("cli.commands.start:run", "Start every role on this machine, or go on."),
        "orchestrator": ("cli.commands.start:orchestrator", "Start a run's orchestrator."),
        "worker": ("cli.commands.start:worker", "Start one rollout worker of a run."),
        "trainer": ("cli.commands.start:trainer", "Start a run's trainer."),
        "task": ("cli.app:task", "Serve a task to workers on other machines."),
        "create-topics": ("cli.commands.start:create_topics", "Create or check a run's topics."),
        "tell": ("cli.commands.start:tell", "Ask a run to change a setting, pause or stop."),
        "doctor": ("cli.commands.machine:doctor", "Check this machine, and a log."),
        "config": ("cli.app:config", "Print a configuration as it will be used."),
    },
    "Observe": {
        "runs": ("cli.commands.observe:runs", "List the runs on this machine."),
        "show": ("cli.commands.observe:show", "What a run, a step, a group or a trajectory is."),
        "why": ("cli.commands.observe:why", "Who waits for what, and what to do about it."),
        "top": ("cli.commands.observe:top", "Watch a run in the terminal."),
        "sql": ("cli.commands.observe:sql", "Ask the tables of a run's log in SQL."),
        "ui": ("cli.commands.observe:ui", "Look at a run in a browser, or write the pages."),
        "metrics": ("cli.commands.observe:metrics", "Serve a run's metrics to Prometheus."),
        "topics": ("cli.commands.observe:topics", "List a run's topics: records and bytes."),
        "cat": ("cli.commands.observe:cat", "Print the records of a topic."),
    },
    "Audit and replay": {
        "audit": ("cli.commands.audit:audit", "Prove a run from its log."),
        "replay": ("cli.commands.audit:replay", "Train or generate again, and compare bits."),
        "export": ("cli.commands.audit:export", "Hand a run to other tools."),
        "prune": ("cli.commands.audit:prune", "Name or delete files that nobody needs."),
    },
    "What else could have been": {
        "bisect": (
            "cli.commands.counterfactual:bisect",
            "Which step made a run bad, and which of its groups.",
        ),
        "diff": ("cli.commands.counterfactual:diff", "Where two runs part, and why."),
        "fork": ("cli.commands.counterfactual:fork", "Which turn decided an episode."),
        "retrain": ("cli.commands.counterfactual:retrain", "Train a run's steps again otherwise."),
        "rescore": (
            "cli.commands.counterfactual:rescore",
            "What another reward would have changed.",
        ),
    },
    "Simulate and measure": {
        "mismatch": ("cli.commands.sim:mismatch", "Where a batch's ratios come from."),
        "sim": ("cli.commands.sim:sim_app", "Play runs under faults; published tables."),
        "bench": ("cli.app:bench", "Measure this machine."),
    },
}

BENCHES: Final[Panels] = {
    "Commands": {
        "engine": ("bench.commands:engine", "Tokens per second of an engine."),
        "bus": ("bench.commands:bus", "Records and bytes per second of every bus."),
        "audit": ("bench.commands:audit", "Time and memory of audits."),
        "codec": ("bench.commands:codec", "Time and size of an encoded trajectory."),
        "data": ("bench.commands:data", "What large data cost a task process."),
        "dataplane": ("bench.commands:dataplane", "Trajectories from worker to batch."),
        "tasks": ("bench.commands:tasks", "Busy slots while environments take their time."),
        "endpoint": ("bench.commands:endpoint", "What calls of agents cost."),
        "memory": ("bench.commands:memory", "Peak memory of a training step."),
        "load": ("bench.commands:load", "Memory of a worker that takes a version."),
        "moves": ("bench.commands:moves", "How soon a moved request goes on."),
        "policies": ("bench.commands:policies", "What versions cost as patches."),
        "plan": ("bench.commands:plan", "Cost of a round of the planner."),
        "catalogue": ("bench.commands:catalogue", "What a log as tables costs."),
        "bisect": ("bench.commands:bisect", "Whether a poisoned group is named."),
        "restart": ("bench.commands:restart", "Time of an orchestrator's restart."),
        "counterfactual": (
            "bench.study_commands:counterfactual",
            "Cost of asking what else could have been.",
        ),
        "paradigms": ("bench.study_commands:paradigms", "A task in every paradigm."),
        "offpolicy": ("bench.study_commands:offpolicy", "Objectives by staleness."),
        "traces": ("bench.study_commands:traces", "What traces cost a run."),
        "faults": ("bench.study_commands:faults", "Kill roles; exit code 5 unless all is clean."),
    }
}

config = lazy_app(
    {"Commands": {"show": ("cli.commands.machine:show", "Every key with its meaning.")}},
    name="config",
    help="The configuration.",
)
task = lazy_app(
    {"Commands": {"serve": ("cli.commands.start:serve_task", "Serve a task until stopped.")}},
    name="task",
    help="Serve a task to workers on other machines.",
)
bench = lazy_app(BENCHES, name="bench", help="Measure this machine.")
app = lazy_app(
    COMMANDS,
    name="dora-pipe",
    help="Asynchronous RL post-training over a log: run it, look at it, prove it, replay it.",
)

"""Commands of `dora-pipe`, with summaries and examples."""

from __future__ import annotations

from typing import Final

from dora_pipe.cli.lazy import Panels, lazy_app

COMMANDS: Final[Panels] = {
    "Start": {
        "demo": (
            "cli.commands.machine:demo",
            "Train a small model, kill a worker, audit, replay.",
            "demo",
        ),
        "init": (
            "cli.commands.start:init",
            "Make a folder with a configuration and a model.",
            "init mine --task calculator",
        ),
        "sft": (
            "cli.commands.start:sft",
            "Warm up a model on (prompt, answer) pairs.",
            "sft mine/config.toml mine/warm --steps 200",
        ),
        "run": (
            "cli.commands.start:run",
            "Start or resume every role on this machine.",
            "run mine/config.toml -o model.path=mine/warm -o run.steps=20",
        ),
        "orchestrator": (
            "cli.commands.start:orchestrator",
            "Start the orchestrator of a run.",
            "orchestrator config.toml",
        ),
        "worker": (
            "cli.commands.start:worker",
            "Start one rollout worker of a run.",
            "worker config.toml --name worker-0",
        ),
        "trainer": (
            "cli.commands.start:trainer",
            "Start the trainer of a run.",
            "trainer config.toml",
        ),
        "task-server": (
            "cli.commands.start:serve_task",
            "Serve a task to workers on other machines.",
            "task-server config.toml --listen 0.0.0.0:7000",
        ),
        "set": (
            "cli.commands.control:set_keys",
            "Change settings of a run.",
            "set demo trainer.learning_rate=1e-5",
        ),
        "control": (
            "cli.commands.control:control",
            "Pause, resume or stop a run, drain a worker, end a batch.",
        ),
        "doctor": (
            "cli.commands.machine:doctor",
            "Check this machine and a log.",
            "doctor --bus kafka://localhost:9092",
        ),
        "memory": (
            "cli.commands.machine:memory",
            "Estimate the GPU memory and disk of a run.",
            "memory models/qwen3-4b --gpus 8x80",
        ),
        "config": (
            "cli.commands.machine:config",
            "Print a resolved configuration, each key with its meaning.",
            "config mine/config.toml -o run.steps=20",
        ),
    },
    "Observe": {
        "show": (
            "cli.commands.observe:show",
            "Show all runs, a run, a step, a group or a trajectory.",
            "show demo 7",
        ),
        "why": (
            "cli.commands.observe:why",
            "Explain what each role waits for and what to do about it.",
            "why demo --step 7",
        ),
        "top": ("cli.commands.observe:top", "Watch a run in the terminal.", "top demo"),
        "sql": (
            "cli.commands.observe:sql",
            "Query the tables of a run's log in SQL.",
            'sql demo "select step, reward from steps"',
        ),
        "ui": ("cli.commands.observe:ui", "Show runs in a browser.", "ui demo"),
        "metrics": (
            "cli.commands.observe:metrics",
            "Serve the metrics of a run to Prometheus.",
            "metrics demo --port 9464",
        ),
        "log": ("cli.commands.log:log", "Create, read and copy the topics of a run."),
    },
    "Audit and replay": {
        "audit": ("cli.commands.audit:audit", "Verify a run from its log.", "audit demo"),
        "replay": (
            "cli.commands.audit:replay",
            "Repeat steps or trajectories and compare bits.",
            "replay demo --from 3 --to 5",
        ),
        "mismatch": (
            "cli.commands.audit:mismatch",
            "Attribute the ratios of a batch to their causes.",
            "mismatch demo --step 7",
        ),
        "export": ("cli.commands.export:export", "Write a run for other tools."),
        "prune": (
            "cli.commands.audit:prune",
            "List or delete files that no record needs.",
            "prune demo --delete",
        ),
    },
    "Analyze": {
        "rescore": (
            "cli.commands.analysis:rescore",
            "Score logged texts with another reward.",
            "rescore demo --reward rewards:length",
        ),
        "retrain": (
            "cli.commands.analysis:retrain",
            "Repeat steps with other settings, rewards or rows.",
            "retrain demo --out slower --set trainer.learning_rate=1e-5",
        ),
        "bisect": (
            "cli.commands.analysis:bisect",
            "Find the step and the group that made a run worse.",
            "bisect demo --good 3 --bad 9",
        ),
        "fork": (
            "cli.commands.analysis:fork",
            "Continue a trajectory again from each turn.",
            "fork demo g0000000042-003 --samples 8",
        ),
        "diff": (
            "cli.commands.analysis:diff",
            "Find the first difference of two runs.",
            "diff demo other",
        ),
    },
}

app = lazy_app(
    COMMANDS,
    name="dora-pipe",
    help="Asynchronous RL post-training over a log: run, observe, audit, replay.",
    version=True,
)

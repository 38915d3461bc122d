"""Commands of `dora-pipe`, with summaries and examples."""

from __future__ import annotations

from typing import Final

from dora_pipe.cli.lazy import Panels, lazy_app

COMMANDS: Final[Panels] = {
    "Start": {
        "demo": ("cli.demo:demo", "Train a small model, kill a worker, audit, replay.", "demo"),
        "init": (
            "cli.start:init",
            "Make a folder with a configuration and a model.",
            "init mine --task calculator",
        ),
        "sft": (
            "cli.start:sft",
            "Warm up a model on (prompt, answer) pairs.",
            "sft mine/config.toml mine/warm --steps 200",
        ),
        "run": (
            "cli.start:run",
            "Start or resume every role on this machine.",
            "run mine/config.toml -o model.path=mine/warm -o run.steps=20",
        ),
        "orchestrator": (
            "cli.start:orchestrator",
            "Start the orchestrator of a run.",
            "orchestrator config.toml",
        ),
        "worker": (
            "cli.start:worker",
            "Start one rollout worker of a run.",
            "worker config.toml --name worker-0",
        ),
        "trainer": ("cli.start:trainer", "Start the trainer of a run.", "trainer config.toml"),
        "task-server": (
            "cli.start:serve_task",
            "Serve a task to workers on other machines.",
            "task-server config.toml --listen 0.0.0.0:7000",
        ),
        "set": (
            "cli.control:set_keys",
            "Change settings of a run.",
            "set demo trainer.learning_rate=1e-5",
        ),
        "control": (
            "cli.app:control",
            "Pause, resume or stop a run, drain a worker, end a batch.",
        ),
        "doctor": (
            "cli.doctor:doctor",
            "Check this machine and a log.",
            "doctor --bus kafka://localhost:9092",
        ),
        "memory": (
            "cli.memory:memory_command",
            "Estimate the GPU memory and disk of a run.",
            "memory models/qwen3-4b --gpus 8x80",
        ),
        "config": (
            "cli.start:config_command",
            "Print a resolved configuration, each key with its meaning.",
            "config mine/config.toml -o run.steps=20",
        ),
    },
    "Observe": {
        "show": (
            "cli.show:show_command",
            "Show all runs, a run, a step, a group or a trajectory.",
            "show demo 7",
        ),
        "why": (
            "cli.why:why",
            "Explain what each role waits for and what to do about it.",
            "why demo --step 7",
        ),
        "top": ("cli.top:top", "Watch a run in the terminal.", "top demo"),
        "sql": (
            "cli.log:sql",
            "Query the tables of a run's log in SQL.",
            'sql demo "select step, reward from steps"',
        ),
        "ui": ("cli.pages:ui", "Show runs in a browser.", "ui demo"),
        "metrics": (
            "cli.pages:metrics",
            "Serve the metrics of a run to Prometheus.",
            "metrics demo --port 9464",
        ),
        "log": ("cli.app:log", "Create, read and copy the topics of a run."),
    },
    "Audit and replay": {
        "audit": ("cli.audit:audit", "Verify a run from its log.", "audit demo"),
        "replay": (
            "cli.replay:replay",
            "Repeat steps or trajectories and compare bits.",
            "replay demo --from 3 --to 5",
        ),
        "mismatch": (
            "cli.mismatch:mismatch",
            "Attribute the ratios of a batch to their causes.",
            "mismatch demo --step 7",
        ),
        "export": ("cli.app:export", "Write a run for other tools."),
        "prune": (
            "cli.prune:prune",
            "List or delete files that no record needs.",
            "prune demo --delete",
        ),
    },
    "Analyze": {
        "rescore": (
            "cli.rescore:rescore",
            "Score logged texts with another reward.",
            "rescore demo --reward rewards:length",
        ),
        "retrain": (
            "cli.retrain:retrain",
            "Repeat steps with other settings, rewards or rows.",
            "retrain demo --out slower --set trainer.learning_rate=1e-5",
        ),
        "bisect": (
            "cli.bisect:bisect",
            "Find the step and the group that made a run worse.",
            "bisect demo --good 3 --bad 9",
        ),
        "fork": (
            "cli.fork:fork",
            "Continue a trajectory again from each turn.",
            "fork demo g0000000042-003 --samples 8",
        ),
        "diff": ("cli.diff:diff", "Find the first difference of two runs.", "diff demo other"),
    },
}

app = lazy_app(
    COMMANDS,
    name="dora-pipe",
    help="Asynchronous RL post-training over a log: run, observe, audit, replay.",
    version=True,
)

control = lazy_app(
    {
        "Commands": {
            "pause": ("cli.control:pause", "Dispatch no new groups.", "control pause demo"),
            "resume": ("cli.control:resume", "Continue a paused run.", "control resume demo"),
            "drain": ("cli.control:drain", "Let a worker leave a run.", "control drain demo w1"),
            "stop": ("cli.control:stop", "End a run early.", "control stop demo --after 30"),
            "fail-batch": (
                "cli.control:fail_batch",
                "End a batch that cannot be trained.",
                "control fail-batch demo",
            ),
        }
    },
    name="control",
    help="Pause, resume or stop a run, drain a worker, end a batch.",
)

export = lazy_app(
    {
        "Commands": {
            "parquet": (
                "cli.export:parquet",
                "Trajectories, one per row.",
                "export parquet demo demo.parquet",
            ),
            "policy": (
                "cli.export:policy",
                "A policy version as a model folder.",
                "export policy demo best model",
            ),
            "traces": (
                "cli.export:traces",
                "OpenTelemetry traces.",
                "export traces demo http://127.0.0.1:4318 --follow",
            ),
            "tensorboard": (
                "cli.export:tensorboard",
                "Metrics of each step for TensorBoard.",
                "export tensorboard demo events",
            ),
            "wandb": (
                "cli.export:wandb",
                "Metrics of each step for W&B.",
                "export wandb demo my-project",
            ),
        }
    },
    name="export",
    help="Write a run, or a part of it, for other tools.",
)

log = lazy_app(
    {
        "Commands": {
            "create": (
                "cli.log:create",
                "Create or check the topics of a run.",
                "log create config.toml",
            ),
            "topics": (
                "cli.log:topics",
                "List the topics of a run: records and bytes.",
                "log topics demo",
            ),
            "read": (
                "cli.log:read",
                "Print the records of a topic.",
                "log read demo trajectories --limit 3",
            ),
            "copy": (
                "cli.log:copy",
                "Copy a run's log into one file or onto Kafka, and compare both.",
                "log copy kafka://broker:9092/mine mine.sqlite",
            ),
        }
    },
    name="log",
    help="Create, read and copy the topics of a run.",
)

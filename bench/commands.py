"""Commands of `python -m bench` and their modules."""

from __future__ import annotations

from typing import Final

from dora_pipe.cli.lazy import Panels, lazy_app

BENCHES: Final[Panels] = {
    "Benchmarks": {
        "engine": ("bench.engine:command", "Tokens per second of an engine."),
        "bus": ("bench.bus:command", "Records and bytes per second of every bus."),
        "dataplane": ("bench.dataplane.measure:command", "Trajectories from worker to batch."),
        "codec": ("bench.codec:command", "Time and size of an encoded trajectory."),
        "audit": ("bench.audit:command", "Time and memory of audits."),
        "plan": ("bench.plan:command", "Longest turn of the orchestrator."),
        "endpoint": ("bench.endpoint:command", "CPU time and memory of agents' calls."),
        "memory": ("bench.step_memory:command", "Peak memory and time of a training step."),
        "serving": ("bench.serving:command", "Tokens per second of vLLM, by a worker and alone."),
        "versions": ("bench.versions:command", "Time from an optimizer step to a token."),
        "faults": ("bench.faults:app", "Kill roles; exit code 5 unless all is clean."),
    },
    "Studies": {
        "paper": ("bench.studies.paper.tables:command", "Published tables, simulated."),
        "paradigms": ("bench.studies.paradigms_study:command", "A task in every paradigm."),
        "offpolicy": ("bench.studies.offpolicy_study:command", "Objectives by staleness."),
        "bisect": ("bench.studies.bisect:command", "Whether bisect names a poisoned group."),
    },
}

app = lazy_app(BENCHES, name="bench", help="Measure this machine, or repeat a study.")

"""Rounds in which a worker is stopped, or killed late in a long request.

`python -m tests.support.process_traps FOLDER` plays them. It is a program because roles are forked
before torch is imported, and a single one because imports take longer than a round.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.launch.examples import EOS, SPECIAL
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.launch.supervisor import Supervisor
from dora_pipe.schemas.control import WorkerJoined, decode_control
from dora_pipe.schemas.rounds import Fence, decode_round
from dora_pipe.schemas.topics import Topics
from tests.support.kill_rounds.inject import Files
from tests.support.kill_rounds.order import Order, Point
from tests.support.kill_rounds.rounds import RoundResult, Session
from tests.support.tidy import ROOT

SEED: Final = 5
STOPPED: Final = Order(
    number=2,
    seed=SEED,
    role="w1",
    at=Point(moment="before", what="trajectories-logged", nth=2),
    stop=True,
)
KILLED_AT: Final = 200
CHECKPOINT_TOKENS: Final = 32
CONTEXT_TOKENS: Final = 640
KILLED: Final = Order(
    number=0,
    seed=SEED,
    role="w1",
    # Both of its requests reached it; the orchestrator learns so after a turn of the bus.
    at=Point(moment="after", what="progress", nth=3, tokens=KILLED_AT),
)
UNHARMED: Final = Order(
    number=1, seed=SEED, role="nobody", at=Point(moment="before", what="round", nth=1)
)

SHORT_LEASE: Final = {"timing.lease_s": 1.5, "run.steps": 12}

LONG_REQUESTS: Final[dict[str, Any]] = {
    "run.steps": 1,
    "rollout.group_size": 2,
    "rollout.prompts_per_step": 2,
    "evaluation.prompts": 0,
    "sampling.max_tokens": 600,
    # The end token's row is zero, so it is never among the ten likeliest.
    "sampling.top_k": 10,
    "workers.max_num_seqs": 2,
    "workers.max_model_len": CONTEXT_TOKENS,
    "workers.checkpoint_tokens": CHECKPOINT_TOKENS,
    # The orchestrator learns progress from heartbeats.
    "timing.heartbeat_s": 0.02,
}
"""Four requests of 600 tokens, two per worker: several turns of the bus between token 200 and
the end."""


def run_traps(folder: Path, *, limit_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.process_traps", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def directory_of(order: Order, folder: Path) -> RunDir:
    return RunDir(folder / f"round-{order.number}-{order.seed}")


def stopped_incarnation(folder: Path) -> int:
    return int((directory_of(STOPPED, folder).path / "stopped-incarnation").read_text())


class _GoOnWhenFenced:
    def __init__(self) -> None:
        self.done = False

    def __call__(self, supervisor: Supervisor, files: Files) -> None:
        hit = files.read_hit()
        if self.done or hit is None:
            return
        topics = Topics(files.directory.name)
        with closing(SqliteBus(files.directory / "log.sqlite")) as bus:
            control = records_of(bus, ends_of(bus, topics.control))
            joined = [(record.offset, decode_control(record.value)) for record in control]
            decisions = records_of(bus, ends_of(bus, topics.decisions))
            rounds = [decode_round(decision.value) for decision in decisions]
        incarnation = max(
            offset
            for offset, fact in joined
            if isinstance(fact, WorkerJoined) and fact.pid == hit.pid
        )
        decided = [decision for round_ in rounds for decision in round_.decisions]
        if any(
            isinstance(decision, Fence) and decision.incarnation == incarnation
            for decision in decided
        ):
            (files.directory / "stopped-incarnation").write_text(str(incarnation))
            os.kill(hit.pid, signal.SIGCONT)
            self.done = True


def _stopped(session: Session) -> None:
    watch = _GoOnWhenFenced()
    _check(session.play(STOPPED, changes=dict(SHORT_LEASE), watch=watch))
    assert watch.done, "nobody was fenced"


def _killed(session: Session) -> None:
    model = session.root / "endless"
    shutil.copytree(session.model(), model)
    _never_end(model)
    changes = {**LONG_REQUESTS, "model.path": str(model)}
    _check(session.play(KILLED, changes=changes))
    _check(session.play(UNHARMED, changes=changes))


def _never_end(model: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][SPECIAL.index(EOS)] = 0.0
    save_file(tensors, path, metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(
            json.dumps(settings | {"max_position_embeddings": CONTEXT_TOKENS})
        )


def _check(played: RoundResult) -> None:
    assert not played.trouble, played.trouble
    assert played.verdict is not None and played.verdict.clean, played.verdict


def main() -> None:
    (folder,) = sys.argv[1:]
    with closing(Session(Path(folder))) as session:
        _stopped(session)
        _killed(session)


if __name__ == "__main__":
    main()

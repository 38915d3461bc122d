"""Runner of kill rounds: production roles in separate processes.

`kill_rounds.order` selects victim and moment, `kill_rounds.inject` wraps ports, `kill_rounds.hunt`
handles random moments. The supervisor restarts roles, the watch restarts brokers, and a final
process judges the run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.core.errors import DoraError, ResourceError
from dora_pipe.launch import local_roles
from dora_pipe.launch.plan import plan_new
from dora_pipe.launch.processes import start_process
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.launch.supervisor import RunFailed, Supervisor, how
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.store.copies import MADE
from tests.support.kill_rounds import roles as fault_roles
from tests.support.kill_rounds.brokers import Brokers
from tests.support.kill_rounds.hunt import BrokerVictim, RoleVictim, Victim, hunting, recovered_s
from tests.support.kill_rounds.inject import Files, Hit
from tests.support.kill_rounds.judge import Verdict
from tests.support.kill_rounds.order import BROKER, PARTITIONS, ROLES, WORKERS, Order

MAX_TOKENS: Final = 48
STEPS: Final = 6
GROUPS: Final = 4
SAMPLES: Final = 4

WHOLE_EVERY: Final = (1, 3, 50)
"""Values of `policies.full_every`: full checkpoints, or mostly deltas."""

LEASE_S: Final = 5.0

DEAD_S: Final = 2 * LEASE_S
"""Downtime beyond every lease."""

CONTROL_FACTS: Final = STEPS * (GROUPS * SAMPLES + 1)
"""Minimum facts in control: each trajectory counts as one."""

ROUND_LIMIT_S: Final = 180.0
"""Seconds after which a round counts as hung."""

CHILD_LIMIT_S: Final = 300.0
"""Limit for building the model (imports torch) and judging."""

NAMES: Final = ROLES

Watch = Callable[[Supervisor, Files], None]
"""Called about 10 times a second during a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    order: Order
    hit: Hit | None
    """None: the moment never came and the round does not count."""
    recovered_s: float | None
    """See `hunt.recovered_s`."""
    verdict: Verdict | None
    trouble: str
    """Error that prevented the end of the run, or the verdict."""
    seconds: float

    @property
    def clean(self) -> bool:
        """Report whether a strike happened without errors. A worker that stays dead need not
        return: the run may end without it."""
        back = self.recovered_s is not None or not self.order.must_come_back
        struck = self.hit is not None and back
        return struck and self.verdict is not None and self.verdict.clean and not self.trouble


class Session:
    """Folder of rounds; `brokers` is the number of Kafka brokers to start.

    Example: ``with closing(Session(folder)) as session: session.play(order)``.
    """

    def __init__(self, root: Path, *, brokers: int = 0) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._brokers = Brokers(root / "brokers", brokers) if brokers else None
        if self._brokers is not None:
            self._brokers.start()

    def close(self) -> None:
        if self._brokers is not None:
            self._brokers.close()

    def model(self) -> Path:
        path = self.root / fault_roles.MODEL
        if not path.exists():
            self._call(fault_roles.MODEL, RunDir(self.root))
        return path

    def play(
        self, order: Order, *, changes: dict[str, Any] | None = None, watch: Watch | None = None
    ) -> RoundResult:
        """Play a round; `changes` are configuration keys, ``{"run.steps": 3}``."""
        began_s = time.monotonic()
        directory = self.directory(order)
        config = round_config(self.model(), order, {**self._place(), **(changes or {})})
        plan = plan_new(config, self.root)
        files = Files(directory.path)
        fault_roles.first_of(directory).write_bytes(encode(plan.first))
        files.order.write_bytes(msgspec.json.encode(order))
        trouble = self._run(directory, config, order, watch)
        if self._brokers is not None:
            self._brokers.heal()
        verdict: Verdict | None = None
        if not trouble:
            verdict, trouble = self._judge(directory)
        hit = files.read_hit()
        return RoundResult(
            order=order,
            hit=hit,
            recovered_s=None if hit is None else recovered_s(files, hit, NAMES),
            verdict=verdict,
            trouble=trouble,
            seconds=time.monotonic() - began_s,
        )

    def directory(self, order: Order) -> RunDir:
        return RunDir(self.root / _run_name(order))

    def forget(self, order: Order) -> None:
        shutil.rmtree(self.directory(order).path)
        if self._brokers is not None:
            self._brokers.forget(Topics(_run_name(order)).all())

    def _place(self) -> dict[str, Any]:
        return {} if self._brokers is None else {"bus.url": self._brokers.url}

    def _run(self, directory: RunDir, config: Config, order: Order, watch: Watch | None) -> str:
        until_s = time.monotonic() + ROUND_LIMIT_S
        files = Files(directory.path)
        copies = directory.store(config) / MADE
        damaged = 0

        def turn() -> None:
            nonlocal damaged
            if time.monotonic() > until_s:
                signal.raise_signal(signal.SIGINT)
            if not damaged and files.hit.exists():
                damaged = damage_copies(copies)
            if self._brokers is not None:
                self._brokers.mend()
            if watch is not None:
                watch(supervisor, files)

        supervisor = Supervisor(
            partial(_start, directory),
            stop_order={
                "workers": WORKERS,
                local_roles.TRAINER: (local_roles.TRAINER,),
                local_roles.ORCHESTRATOR: (local_roles.ORCHESTRATOR,),
            },
            timing=config.timing,
            logs=directory.logs,
            watch=turn,
        )
        topics = Topics(config.run.name)
        victim = self._victim(order, supervisor, topics)
        with hunting(order, victim, files, directory.bus_url(config), topics):
            try:
                finished = supervisor.run()
            except RunFailed as error:
                return error.message
        return "" if finished else f"it did not end within {ROUND_LIMIT_S:.0f} s"

    def _victim(self, order: Order, supervisor: Supervisor, topics: Topics) -> Victim:
        if order.role == BROKER:
            assert self._brokers is not None
            return BrokerVictim(order, topics, self._brokers)
        return RoleVictim(order, supervisor)

    def _judge(self, directory: RunDir) -> tuple[Verdict | None, str]:
        try:
            self._call(fault_roles.JUDGE, directory)
        except DoraError as error:
            return None, error.message
        written = fault_roles.verdict_of(directory).read_bytes()
        return msgspec.json.decode(written, type=Verdict), ""

    def _call(self, name: str, directory: RunDir) -> None:
        process = _start(directory, name)
        try:
            code = process.wait(CHILD_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ResourceError(f"{name} did not end within {CHILD_LIMIT_S:.0f} s") from None
        finally:
            process.kill()
            process.wait()
        if code:
            log = directory.logs / f"{name}.log"
            raise ResourceError(f"{name} {how(code)}", hint=f"see {log}")


def _start(directory: RunDir, name: str) -> subprocess.Popen[bytes]:
    start = fault_roles.FaultStart(name=name, directory=str(directory.path), parent_pid=os.getpid())
    log = directory.logs / f"{name}.log"
    return start_process(fault_roles.__name__, msgspec.json.encode(start), log)


def damage_copies(folder: Path) -> int:
    """Flip a bit of every version built from deltas and return their number; open files keep
    their content."""
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        partial = path.with_suffix(".damaged")
        partial.write_bytes(data)
        partial.replace(path)
    return len(paths)


def round_config(model: Path, order: Order, changes: dict[str, Any]) -> Config:
    """Short run with evaluation, progress records, checkpoints and minibatches.

    Every third round has a slow judge and more requests than slots. Most have deltas
    (`WHOLE_EVERY`); after a strike, all versions built from them are damaged.
    """
    plain: dict[str, Any] = {
        "run": {"name": _run_name(order), "steps": STEPS, "seed": order.seed},
        "model": {"path": str(model)},
        "task": {"kind": "tests.support.kill_rounds.task:DigitShare", "options": {"sigma": 0.5}},
        "sampling": {"max_tokens": MAX_TOKENS},
        "rollout": {"group_size": SAMPLES, "prompts_per_step": GROUPS},
        "staleness": {"max_staleness": 2},
        "evaluation": {"prompts": 4, "every": 3, "sampling": {"max_tokens": MAX_TOKENS}},
        "trainer": {"learning_rate": 1e-3, "minibatches": 2, "checkpoint_every": 4},
        "workers": {
            "count": len(WORKERS),
            "max_num_seqs": 8,
            "max_model_len": fault_roles.CONTEXT_TOKENS,
            "checkpoint_tokens": 8,
        },
        "policies": _policies(order),
        "bus": {"partitions": PARTITIONS},
        "timing": {"heartbeat_s": 0.2, "lease_s": LEASE_S},
    }
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if name:
            plain[section][name] = value
        else:
            plain[section] = value
    if order.number % 3 == 0:
        plain["task"]["kind"] = "tests.support.kill_rounds.task:JudgedDigits"
    if order.number % 2:
        _make_several(plain)
    return msgspec.convert(plain, Config)


def _policies(order: Order) -> dict[str, Any]:
    every = random.Random(f"{order.seed}/versions").choice(WHOLE_EVERY)
    return {"full_every": every} | ({} if every == 1 else {"dtype": "bfloat16"})


def _make_several(plain: dict[str, Any]) -> None:
    task, evaluation = plain["task"], plain["evaluation"]
    plain["task"] = task | {"name": "often", "ratio": 3.0}
    drawn = {"options": {"sigma": 0.3}, "sampler": "dora_pipe.sim.parts:weights"}
    ranked = {"kind": "tests.support.kill_rounds.task:Ranked"}
    plain["more_tasks"] = [task | drawn | ranked | {"name": "seldom"}]
    plain["evaluation"] = evaluation | {"name": "often"}
    own = {"name": "seldom", "task": "seldom", "every": 2, "prompts": 2, "group_size": 2}
    plain["more_evaluations"] = [evaluation | own]


def _run_name(order: Order) -> str:
    return f"round-{order.number}-{order.seed}"

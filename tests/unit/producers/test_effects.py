"""The table at the head of `effects` names every effect, the port that takes it, and its events."""

import re
from typing import get_args

from dora_pipe.producers.sessions.port import SessionPort
from dora_pipe.producers.worker import effects
from dora_pipe.producers.worker.effects import Effect, LoadFailed, RequestEvent
from dora_pipe.producers.worker.engine_port import EnginePort
from dora_pipe.producers.worker.kv_handover import NoHandover
from dora_pipe.producers.worker.ports import CodecPort, HandoverPort, TaskPort
from dora_pipe.producers.worker.resume import ProgressPort
from dora_pipe.producers.worker.scoring import GroupPort

ROW = re.compile(r"^    (\w+) +(\w+) +(-|[\w, ]+?)  +\w+ .+$", re.MULTILINE)
ROWS = ROW.findall((effects.__doc__ or "").partition("done by\n")[2])


def test_table_names_every_effect_once_with_the_port_that_takes_it() -> None:
    ports = {
        "TaskPort": TaskPort.effects,
        "EnginePort": EnginePort.effects,
        "CodecPort": CodecPort.effects,
        "ProgressPort": ProgressPort.effects,
        "GroupPort": GroupPort.effects,
        "SessionPort": SessionPort.effects,
        "HandoverPort": HandoverPort(NoHandover(), in_thread=False).effects,
    }
    taken = {(kind.__name__, name) for name, kinds in ports.items() for kind in kinds}
    assert {(effect, port) for effect, port, _ in ROWS} == taken
    assert sorted(effect for effect, _, _ in ROWS) == sorted(k.__name__ for k in get_args(Effect))


def test_events_of_the_table_are_those_that_a_request_may_hear_and_those_of_a_load() -> None:
    named = {event for _, _, events in ROWS for event in events.split(", ") if event != "-"}
    heard = {kind.__name__ for kind in get_args(RequestEvent)}
    of_groups = {"GroupFetched", "GroupRewarded"}
    assert named == heard | of_groups | {"WeightsLoaded", LoadFailed.__name__}

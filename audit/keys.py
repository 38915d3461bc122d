"""Under which key each fact lies in control: who says it, or which request it is about."""

from __future__ import annotations

from dora_pipe.schemas.control import (
    AnyControl,
    BatchRefused,
    Command,
    RequestFailed,
    RequestReleased,
    RoleStarted,
    StepCommitted,
    TrajectoriesLogged,
    VersionsDropped,
    WeightsAdopted,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
)


def key_of(record: AnyControl) -> bytes:
    """The key that a fact may have; it may also have none. Empty for one that has none."""
    match record:
        case WorkerJoined() | WorkerReady() | WorkerLeft() | TrajectoriesLogged():
            return record.worker.encode()
        case RequestReleased() | RequestFailed():
            return record.trajectory.encode()
        case StepCommitted() | BatchRefused() | WeightsAdopted():
            return b"trainer"
        case RoleStarted():
            return record.role.encode()
        case Command() | VersionsDropped():
            return b"user"
        case _:
            return b""

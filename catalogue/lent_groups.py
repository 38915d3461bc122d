"""Groups that a run borrows from another one, as that log tells of them and as they count here.

It decides how far the other log is read: to where the groups have ended that a batch names, and no
further. Those that no later step may train are let go of, so memory does not grow with either run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from dora_pipe.catalogue.account import GroupEnded, RunAccount
from dora_pipe.catalogue.group_history import GroupHistory
from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.rounds import Round


class ChangedRows(msgspec.Struct, frozen=True, kw_only=True):
    """The file of `Retrained.change`.

    Example: ``{"rewards": {}, "weights": {}, "without": ["g0000000042"]}``
    """

    without: list[str] = []
    """Groups and trajectories that do not count, sorted."""
    rewards: dict[str, float] = {}
    """By trajectory, in place of those of the log."""
    weights: dict[str, float] = {}
    """Factors of the loss, by trajectory."""


def decode_changed_rows(value: bytes) -> ChangedRows:
    """What such a file says. Raises SchemaError."""
    try:
        return msgspec.json.decode(value, type=ChangedRows)
    except msgspec.DecodeError as error:
        raise SchemaError(f"this is no change of batches: {error}") from None


UNCHANGED: Final = ChangedRows()


class Advances(Protocol):
    """Who reads a log; see `LogFollower`."""

    def advance(self) -> bool:
        """Read one piece; whether there is more."""
        ...

    def close(self) -> None:
        """Let go of the log."""
        ...


class LentGroups:
    """Example: ``lent.take(("g0000000042",), step=12)``, in the order of the steps; close it."""

    def __init__(
        self,
        follow: Callable[[LenderAccount], Advances],
        *,
        first: int,
        change: ChangedRows = UNCHANGED,
    ) -> None:
        """`follow` reads the lender's log into an account; `first` is the first step here."""
        self._lender = LenderAccount(first)
        self._follower = follow(self._lender)
        self._change = change
        self._without = frozenset(change.without)
        self._changed = {group_of(name) for name in (*change.rewards, *change.without)}

    def take(self, names: Iterable[str], step: int) -> list[GroupHistory]:
        """Those of these groups that the lender has, as they count in this step of the borrower.

        Raises BusError, LogTruncated.
        """
        ended, wanted = self._lender.ended, list(names)
        while any(one not in ended for one in wanted) and self._follower.advance():
            pass
        found = [ended.pop(one) for one in wanted if one in ended]
        for name in [name for name, one in ended.items() if one.spec.deadline < step]:
            del ended[name]
        return [self._counted(one) for one in found]

    def close(self) -> None:
        """Let go of the lender's log."""
        self._follower.close()

    def _counted(self, group: GroupHistory) -> GroupHistory:
        group.lent, group.left_out = True, group.spec.group in self._without
        if group.spec.group not in self._changed:
            return group
        rewards = self._change.rewards
        for name, request in group.requests.items():
            logged = request.logged
            if logged is None:
                continue
            if name in self._without:
                request.logged = msgspec.structs.replace(logged, reward=None)
            elif name in rewards and rewards[name] != logged.reward:
                # Parts and answer are those of the reward that it was.
                request.logged = msgspec.structs.replace(
                    logged, reward=rewards[name], parts={}, answer="", error=""
                )
                group.scores = None
        return group


class LenderAccount:
    """What has ended of the training groups that the steps from `first` on may train."""

    def __init__(self, first: int) -> None:
        self.ended: dict[str, GroupHistory] = {}
        self._first = first
        self._account = RunAccount()

    def fact(self, offset: int, fact: AnyControl) -> None:
        self._keep(self._account.fact(offset, fact))

    def round(self, round_: Round, offset: int) -> None:
        """A round, after the facts that it folds."""
        self._keep(self._account.round(round_, offset))

    def _keep(self, events: Iterable[object]) -> None:
        for event in events:
            if isinstance(event, GroupEnded):
                spec = event.group.spec
                if spec.purpose == "train" and spec.deadline >= self._first:
                    self.ended[spec.group] = event.group

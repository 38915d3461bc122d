"""Episodes that are looked for at the servers of a task, one server after the other. It decides
where to ask next, and when an episode is nowhere and begins anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from dora_pipe.producers.tasks.calls import Claim, PromptCall
from dora_pipe.producers.tasks.child import Child, OpenCall

WAIT_S: Final = 10.0
"""How long an episode is looked for at servers that do not answer now."""

_NS: Final = 1_000_000_000


def keyed(call: PromptCall, run: str) -> PromptCall:
    """With the key that follows from its trajectory: ``"run@7:g0000000042-003"``, attempt 2, of the
    request ``"g0000000042-003/2"``."""
    trajectory, _, attempt = call.request.partition("/")
    number = int(attempt) if attempt.isdecimal() else 0
    return msgspec.structs.replace(call, key=f"{run}:{trajectory}", attempt=number)


def claim_of(call: PromptCall) -> Claim:
    """To be asked before its prompt is."""
    return Claim(request=call.request, key=call.key, attempt=call.attempt)


class Claims:
    """Claims that no process works on now."""

    def __init__(self) -> None:
        self._waiting: deque[OpenCall] = deque()

    def add(self, call: OpenCall) -> None:
        """One that has yet to be asked somewhere."""
        self._waiting.append(call)

    def extend(self, calls: Iterable[OpenCall]) -> None:
        """Those of a process that has died."""
        self._waiting.extend(calls)

    def send(
        self, children: Sequence[Child], failing: Collection[str], now_ns: int
    ) -> list[PromptCall]:
        """Ask where it has not been asked; gives the prompts of those that are nowhere.

        `failing`: servers that are left alone, or were, and have not answered since.
        """
        nowhere: list[PromptCall] = []
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            assert call.claims is not None
            there = [
                one for one in children if not one.exhausted and one.link.url not in call.asked
            ]
            roomy = [one for one in there if one.roomy]
            patient = now_ns < call.since_ns + int(WAIT_S * _NS)
            if call.forgotten:
                continue
            if roomy:
                min(roomy, key=lambda child: child.load).send(call, now_ns)
            elif there or (patient and any(url not in call.asked for url in failing)):
                self._waiting.append(call)
            else:
                nowhere.append(call.claims)
        return nowhere

"""A simulated server of tasks keeps episodes as production's does, and tells of what is not so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    EpisodeLost,
    Forget,
    PromptCall,
    PromptReady,
    TaskEvent,
)
from dora_pipe.producers.tasks.port import Turn
from dora_pipe.sim.kept import KeptTasks, Server
from dora_pipe.sim.parts import MS, answer_of, prompt_of
from dora_pipe.sim.role import WorldClock

KEEP_NS = 500 * MS
NAME = "g0000000001-000"


class Place:
    """A server, and what is to happen later."""

    def __init__(self) -> None:
        self.clock = WorldClock()
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.server = Server(7, KEEP_NS, self._wrong, self._after)

    def _wrong(self, check: str, what: str) -> None:
        raise InvariantBroken(f"{check}: {what}")

    def _after(self, ns: int, act: Callable[[], None]) -> None:
        self.later.append((self.clock.ns + ns, act))

    def worker(self, number: int) -> KeptTasks:
        """The pool of an incarnation."""
        return KeptTasks(
            self.clock,
            answer=lambda call: (
                prompt_of(call, episode=True) if isinstance(call, PromptCall) else answer_of(call)
            ),
            delay_ns=lambda call: 5 * MS,
            server=self.server,
            world=self.clock,
            run="sim",
            incarnation=number,
        )

    def wait(self, ns: int = 10 * MS) -> None:
        """Time goes on."""
        self.clock.ns += ns
        due, self.later = self.later, []
        for at_ns, act in due:
            if at_ns <= self.clock.ns:
                act()
            else:
                self.later.append((at_ns, act))

    def prompt(self, tasks: KeptTasks, attempt: int, *, again: bool) -> bool:
        """Whether the episode was found."""
        call = PromptCall(request=f"{NAME}/{attempt}", split="train", index=3, again=again)
        tasks.start(call)
        self.wait()
        (ready,) = tasks.poll()
        assert isinstance(ready, PromptReady) and ready.kept
        return ready.found

    def tell(self, tasks: KeptTasks, attempt: int, text: str) -> TaskEvent:
        """What a turn is answered."""
        tasks.start(EnvStep(request=f"{NAME}/{attempt}", turn=Turn(text=text)))
        self.wait()
        (seen,) = tasks.poll()
        return seen


def text_of(seen: TaskEvent) -> str:
    assert isinstance(seen, EnvObserved), seen
    return seen.text


def test_a_step_that_nobody_heard_of_is_answered_to_who_tells_it_again() -> None:
    place = Place()
    first, second = place.worker(1), place.worker(2)
    assert not place.prompt(first, 1, again=False)
    said = text_of(place.tell(first, 1, "5"))
    first.start(EnvStep(request=f"{NAME}/1", turn=Turn(text="6")))
    first.close()
    assert place.prompt(second, 2, again=True)
    assert text_of(place.tell(second, 2, "5")) == said
    assert text_of(place.tell(second, 2, "6")).split()[0] == "4"
    assert text_of(place.tell(second, 2, "7")).split()[0] == "5"
    assert place.server.counted["step unheard"] == place.server.counted["step known"] == 1


def test_a_later_attempt_takes_it_from_who_still_has_it() -> None:
    place = Place()
    first, second = place.worker(1), place.worker(2)
    place.prompt(first, 1, again=False)
    assert place.prompt(second, 2, again=True)
    lost = place.tell(first, 1, "5")
    assert isinstance(lost, EpisodeLost) and "later attempt" in lost.message
    assert not place.prompt(first, 1, again=True), "nor does the earlier one get it back"
    third = place.worker(3)
    assert place.prompt(third, 3, again=True), "what it began meanwhile is not in its way"


@pytest.mark.parametrize("how", ["waits", "dies"])
def test_it_is_gone_when_nobody_comes_in_time_or_the_server_dies(how: str) -> None:
    place = Place()
    first = place.worker(1)
    place.prompt(first, 1, again=False)
    place.tell(first, 1, "5")
    first.start(Forget(request=f"{NAME}/1", keep=True))
    if how == "waits":
        place.wait(KEEP_NS)
    else:
        assert place.server.die()
    assert not place.prompt(place.worker(2), 2, again=True)


def test_an_episode_that_its_request_has_ended_and_another_one_needs_is_a_finding() -> None:
    place = Place()
    first = place.worker(1)
    place.prompt(first, 1, again=False)
    place.tell(first, 1, "5")
    first.start(Forget(request=f"{NAME}/1"))
    with pytest.raises(InvariantBroken, match=r"episode: .* was ended by attempt 1"):
        place.prompt(place.worker(2), 2, again=True)


def test_another_turn_than_it_was_told_before_is_a_finding() -> None:
    place = Place()
    first, second = place.worker(1), place.worker(2)
    place.prompt(first, 1, again=False)
    place.tell(first, 1, "5")
    place.prompt(second, 2, again=True)
    with pytest.raises(InvariantBroken, match=r"episode: .*another turn 0"):
        place.tell(second, 2, "6")

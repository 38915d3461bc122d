"""What the turns of an episode are worth: continuations from where each began. Decides which
episodes are valued, and what is sampled of them.

    REWARDING -> VALUING (its continuations: PROMPTING -> ENVIRONMENT (told again) -> WAITING -> ...
    -> REWARDING -> gone) -> ENCODING

An episode of several turns that has its reward stays here until continuations from the beginnings
of its later turns have theirs. A continuation is a request inside the worker: it has the first
tokens of its episode and a random stream of its own, goes on as an episode does whose process has
died (`episodes`), under the same version, and is scored. Nothing of it is logged but the mean
reward of its place, in the record of its episode.

Rules:

1. A value is an addition: whatever is lost on the way (a process, an answer that differs, a reward
   that fails, a version that is replaced, a worker that leaves) leaves a sample or a place out, and
   never an episode.
2. What a continuation draws follows from its episode's seed, the place and its number
   (`identity.continuation_seed`): a worker that does it again comes to the same values, and so does
   `dora-pipe fork`.
3. Of all episodes at most `slots` continuations are open at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from dora_pipe.core.runtime import Now
from dora_pipe.producers.tasks.calls import Rewarded, TaskFailed
from dora_pipe.producers.worker.request import Phase, RequestState, state_of
from dora_pipe.producers.worker.requests import Requests
from dora_pipe.producers.worker.session import Continuation, Valuing
from dora_pipe.schemas.control import REPLAY_DIFFERS
from dora_pipe.schemas.identity import continuation_seed, derive_seed
from dora_pipe.schemas.turn_values import TurnValue, turn_places

NOT_SAMPLED: Final = "turn values not sampled"
"""What is counted of continuations that came to nothing, with why."""

_SEEDS: Final = 2**63


def is_valued(seed: int, share: float) -> bool:
    """Whether the episode of this seed is among so many that are valued."""
    return derive_seed("valued", seed) < share * _SEEDS


class Valuations:
    """All episodes of one incarnation whose turns are valued."""

    def __init__(self, requests: Requests) -> None:
        """`requests`: of which they are some, and their continuations too."""
        self._requests = requests
        self._setup = requests.setup
        self._keys: dict[str, None] = {}
        requests.withhold = self._withholds

    def handle(self, event: Any, now: Now) -> bool:
        """Take the reward of a continuation; False for any other event."""
        request = self._requests.by_key.get(getattr(event, "request", ""))
        if request is None or request.continuation is None or request.phase is not Phase.REWARDING:
            return False
        match event:
            case Rewarded():
                self._note(request, request.continuation, event.reward)
            case TaskFailed():
                self._requests.counts[f"{NOT_SAMPLED}: {event.error}"] += 1
            case _:
                return False
        self._requests.gone(request)
        return True

    def settle(self) -> None:
        """Begin what may be begun; an episode whose places are all valued goes on."""
        for key in list(self._keys):
            request = self._requests.by_key.get(key)
            if request is None or request.valuing is None or request.phase is not Phase.VALUING:
                del self._keys[key]
                continue
            self._begin(request, request.valuing)
            if not request.valuing.left and not request.valuing.open:
                del self._keys[key]
                request.turn_values = tuple(_values(request.valuing))
                self._requests.encode(request)

    def _withholds(self, request: RequestState) -> bool:
        """Whether a request that is complete has no record: a continuation, which has ended in an
        error; or none yet, because its turns are to be valued."""
        if request.continuation is not None:
            self._requests.counts[f"{NOT_SAMPLED}: {(request.error or '').partition(':')[0]}"] += 1
            self._requests.gone(request)
            return True
        if request.valuing is not None or not self._is_chosen(request):
            return False
        _, *later = turn_places(request.sequence.segments).values()
        samples = range(self._setup.turn_value_samples)
        request.valuing = Valuing(
            left=deque(
                Continuation(parent=request.key, token=token, sample=sample)
                for token in later
                for sample in samples
            )
        )
        self._requests.enter(request, Phase.VALUING)
        self._keys[request.key] = None
        return True

    def _is_chosen(self, request: RequestState) -> bool:
        share = self._setup.turn_values.get(request.source, 0.0)
        return (
            request.place.spec.purpose == "train"
            and request.replayable
            and request.session is None
            and request.reward is not None
            and self._requests.keeps(request)
            and len(turn_places(request.sequence.segments)) > 1
            and is_valued(request.seed, share)
        )

    def _begin(self, request: RequestState, valuing: Valuing) -> None:
        if not self._requests.keeps(request):
            valuing.left.clear()
        while valuing.left and self._open < self._setup.slots:
            one = valuing.left.popleft()
            made = self._continuation(request, one)
            valuing.open.add(made.key)
            self._requests.insert(made)
            self._requests.ask_prompt(made)

    @property
    def _open(self) -> int:
        """Continuations that are here."""
        found = (self._requests.by_key.get(key) for key in self._keys)
        return sum(len(one.valuing.open) for one in found if one is not None and one.valuing)

    def _continuation(self, request: RequestState, one: Continuation) -> RequestState:
        """The request that goes on from where a turn began: with all that was said before, to be
        told to a fresh environment."""
        turns = turn_places(request.sequence.segments)
        turn = next(turn for turn, token in turns.items() if token == one.token)
        place = msgspec.structs.replace(request.place, resume=None, kv=None)
        now = Now(mono_ns=self._requests.now_ns, wall_ns=request.placed_ns)
        made = state_of(place, self._setup, now)
        made.key = f"{place.trajectory}.{one.token}.{one.sample}/{place.attempt}"
        made.seed = continuation_seed(request.seed, one.token, one.sample)
        made.continuation = one
        made.sequence = request.sequence.before_turn(turn)
        made.episode = made.replayable = True
        made.turn_finish = "stop"
        return made

    def _note(self, request: RequestState, of: Continuation, reward: float) -> None:
        parent = self._requests.by_key.get(of.parent)
        if parent is None or parent.valuing is None or not math.isfinite(reward):
            return
        ids, token = request.sequence.token_ids, of.token
        # An answer may begin as the recorded one, and go on.
        starts = turn_places(request.sequence.segments).values()
        if token not in starts or ids[:token] != parent.sequence.token_ids[:token]:
            self._requests.counts[f"{NOT_SAMPLED}: {REPLAY_DIFFERS}"] += 1
        else:
            parent.valuing.rewards.setdefault(token, []).append(reward)


def _values(valuing: Valuing) -> Iterator[TurnValue]:
    """A value for each place that has a sample with a reward."""
    for token, rewards in sorted(valuing.rewards.items()):
        yield TurnValue(
            token=token,
            mean=math.fsum(rewards) / len(rewards),
            samples=len(rewards),
            sampled=valuing.sampled[token],
        )

"""C1, token by token: whether a logged trajectory is what its version alone would have sampled.

The simulated engine's tokens are a function of (weights digest, seed, position), so a trajectory
that was mixed from two versions, resumed from another request's progress or sampled under another
seed equals none.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

from dora_pipe.audit.reading import horizon_of, records_of
from dora_pipe.core.errors import SchemaError
from dora_pipe.producers.engines.simulated import END_TOKEN, VOCABULARY, mix64
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.sim.checks import Wrong
from dora_pipe.sim.world import World

TOLERANCE: Final = 1e-4
"""Of log-probs, which the log keeps as 32-bit floats."""


def check_tokens(world: World, wrong: Wrong) -> None:
    """Every trajectory in the log; those that cannot be read are not ours."""
    for record in records_of(world.bus, horizon_of(world.bus, world.topics).trajectories):
        try:
            trajectory = decode_trajectory(record.value)
        except SchemaError:
            continue
        place = strange_token(trajectory)
        if place is not None:
            version = trajectory.version
            what = f"{trajectory.trajectory}: token {place} is not one of version {version}"
            wrong("C1", what)


def strange_token(trajectory: Trajectory) -> int | None:
    """The first sampled position that is not its version's; None if all are."""
    digest = hashlib.sha256(trajectory.digest.encode()).digest()
    key = int.from_bytes(digest[:8], "big") ^ trajectory.meta.seed
    tokens, mask, logprobs = trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs
    base = mix64(key)
    for place in range(trajectory.meta.prompt_tokens, len(tokens)):
        if not mask[place]:
            continue
        drawn = mix64(base ^ place)
        token = drawn % (VOCABULARY - 1)
        token += token >= END_TOKEN
        logprob = -math.log(VOCABULARY) * ((drawn >> 32) + 1) / 2**32
        found = logprobs[place]
        if tokens[place] not in (token, END_TOKEN) or found is None:
            return place
        if abs(found - logprob) > TOLERANCE:
            return place
    return None

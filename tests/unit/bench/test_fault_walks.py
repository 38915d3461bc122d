"""What servers counted of a kill round's steps, and what the log has of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.bench.faults.episodes import SERVED, WALK, Walks
from dora_pipe.bench.faults.inject import Hit
from dora_pipe.bench.faults.walks import STEP_NS, Walked, walked_once
from dora_pipe.bus.memory import MemoryBus
from dora_pipe.bus.port import Append, TopicSpec
from dora_pipe.schemas.headers import header_pairs
from dora_pipe.schemas.rounds import Dispatch, Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Segment, Trajectory
from dora_pipe.schemas.trajectory_codec import encode_trajectory
from dora_pipe.schemas.wire import encode
from tests.golden.arrow_values import PLAIN_TRAJECTORY
from tests.golden.values import SPEC

INDEX: Final = 3
NUMBERS: Final = Walks().rows("train")[INDEX]["numbers"]
MS: Final = 1_000_000

Turn = tuple[int, str]
"""What is sampled and answered (its id and the next one), and by whom."""

FIRST: Final[list[Turn]] = [(10, "w0"), (20, "w0"), (30, "w1")]
SECOND: Final[list[Turn]] = [(40, "w1"), (50, "w1")]


def trajectory(sibling: int, turns: list[Turn], *, cut: bool = False) -> Trajectory:
    """`cut`: a limit has ended a last turn, which nobody answers."""
    kinds = [("prompt", "", "")]
    kinds += [one for _, who in turns for one in (("model", who, ""), ("environment", "", WALK))]
    ids = [1, *(one for at, _ in turns for one in (at, at + 1))]
    if cut:
        kinds, ids = [*kinds, ("model", "w1", "")], [*ids, 99]
    sampled = [int(kind == "model") for kind, _, _ in kinds]
    logprobs = [-0.5 if one else None for one in sampled]
    segments = [
        Segment(
            kind=kind,  # type: ignore[arg-type]
            start=at,
            end=at + 1,
            turn=max(0, (at - 1) // 2),
            start_ns=0,
            end_ns=0,
            worker=who,
            epoch=1 if who else -1,
            tool=tool,
        )
        for at, (kind, who, tool) in enumerate(kinds)
    ]
    meta = msgspec.structs.replace(
        PLAIN_TRAJECTORY.meta,
        group=SPEC.group,
        sibling=sibling,
        purpose="train",
        deadline=SPEC.deadline,
        index=INDEX,
        task=SERVED,
    )
    return replace(
        PLAIN_TRAJECTORY,
        trajectory=f"{SPEC.group}-{sibling:03}",
        token_ids=ids,
        logprobs=logprobs,
        sampler_logprobs=logprobs,
        loss_mask=sampled,
        segments=segments,
        meta=meta,
    )


def steps(walk: str, turns: list[Turn], at_ns: int = 0) -> list[str]:
    """The lines that an environment writes, a step every second."""
    return [
        json.dumps([walk, 1, at_ns + turn * 1000 * MS, NUMBERS, str(at), str(at + 1)])
        for turn, (at, _) in enumerate(turns)
    ]


def walked(
    folder: Path,
    made: list[Trajectory],
    lines: list[str],
    *,
    size: int,
    kills: tuple[Hit, ...] = (),
) -> Walked:
    """With a group of so many siblings."""
    bus, topics = MemoryBus(), Topics("tiny")
    bus.create([TopicSpec(name=name) for name in topics.all()])
    spec = msgspec.structs.replace(SPEC, index=INDEX, task=SERVED, size=size)
    dispatch = Dispatch(reason="", spec=spec)
    round_ = Round(ordinal=0, role_epoch=0, now_ns=0, control_next=0, decisions=(dispatch,))
    writer = bus.writer()
    writer.append([Append(topic=topics.decisions, value=encode(round_))])
    for one in made:
        value, headers = encode_trajectory(one)
        append = Append(topic=topics.trajectories, value=value, headers=header_pairs(headers))
        writer.append([append])
    path = folder / "walked"
    path.write_text("".join(f"{line}\n" for line in lines))
    return walked_once(bus, topics, path, kills, lambda ids: " ".join(map(str, ids)))


def test_episodes_that_are_each_the_steps_of_one_environment_are_clean(tmp_path: Path) -> None:
    made = [trajectory(0, FIRST), trajectory(1, SECOND, cut=True)]
    found = walked(tmp_path, made, [*steps("a", FIRST), *steps("b", SECOND)], size=2)
    assert found.clean, found
    assert (found.episodes, found.steps, found.carried) == (2, 5, 1)


def test_a_step_that_its_environment_never_made_or_made_again_is_seen(tmp_path: Path) -> None:
    made, lines = [trajectory(0, FIRST)], steps("a", FIRST)
    assert walked(tmp_path, made, lines, size=1).clean
    assert walked(tmp_path, made, lines[:-1], size=1).lost == 1
    assert walked(tmp_path, made, [*lines, lines[-1]], size=1).lost == 1


def test_an_episode_that_two_environments_have_played_is_seen(tmp_path: Path) -> None:
    made, lines = [trajectory(0, FIRST)], [*steps("a", FIRST), *steps("b", FIRST[:1])]
    found = walked(tmp_path, made, lines, size=1)
    assert (found.lost, found.twice, found.clean) == (0, 1, False)
    assert walked(tmp_path, made, lines, size=2).clean, "of a sibling that was still open"


def test_no_steps_prove_nothing(tmp_path: Path) -> None:
    assert not walked(tmp_path, [], [], size=1).clean


def test_a_worker_is_killed_in_a_step_where_that_was_under_way(tmp_path: Path) -> None:
    made, lines = [trajectory(0, SECOND)], steps("a", SECOND)

    def struck(at_ns: int, walk: str = "a") -> tuple[int, int]:
        kills = (Hit(role="w0", pid=1, phase="", at_ns=at_ns, walk=walk),)
        found = walked(tmp_path, made, lines, size=1, kills=kills)
        return found.under_way, found.carried

    assert struck(1000 * MS + MS) == (1, 1)
    assert struck(1000 * MS + STEP_NS) == (0, 1)
    assert struck(1000 * MS + MS, walk="") == (0, 0)

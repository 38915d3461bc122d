"""Numbered trajectories of a synthetic run."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from dora_pipe.bench.codec import in_arrays, sample_trajectory
from dora_pipe.bench.dataplane.process import GROUP_SIZE, PARTITIONS
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.headers import header_pairs
from dora_pipe.schemas.identity import group_id, parse_trajectory_id, partition_of, trajectory_id
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import encode_trajectory
from dora_pipe.schemas.wire import SCHEMA_VERSION

DIGESTS: Final = {3: "a1" * 32, 4: "b2" * 32}

_SEED: Final = 21

DEADLINE: Final = 1_000_000
"""Deadline that no step reaches."""


def run_started(run: str) -> RunStarted:
    return RunStarted(
        at_ns=0,
        run=run,
        schema_version=SCHEMA_VERSION,
        config={},
        config_digest="",
        dataset_digest="",
        dataset_rows=0,
        eval_digest="",
        eval_rows=0,
        seed=_SEED,
        policy=Manifest(digest=DIGESTS[3], bytes=0, tensors=()),
        assets_digest="",
        planner="",
        package="",
    )


class Source:
    """Trajectories with equal tokens and different records."""

    def __init__(self, run: str, tokens: int) -> None:
        sample = in_arrays(sample_trajectory(tokens))
        meta = msgspec.structs.replace(
            sample.meta, run=run, deadline=DEADLINE, group_size=GROUP_SIZE
        )
        self._of_version = [
            replace(
                sample,
                version=version,
                digest=digest,
                segments=[
                    msgspec.structs.replace(segment, version=version)
                    if segment.kind == "model"
                    else segment
                    for segment in sample.segments
                ],
                meta=meta,
            )
            for version, digest in DIGESTS.items()
        ]

    def __call__(self, number: int) -> Trajectory:
        """Return a trajectory; a group has one version."""
        ordinal, sample = divmod(number, GROUP_SIZE)
        like = self._of_version[ordinal % len(self._of_version)]
        group = group_id("train", ordinal)
        meta = msgspec.structs.replace(like.meta, group=group, sample=sample)
        return replace(like, trajectory=trajectory_id(group, sample), meta=meta)


def encoded(trajectory: Trajectory, topic: str) -> Append:
    value, headers = encode_trajectory(trajectory)
    _, ordinal, _ = parse_trajectory_id(headers.trajectory)
    return Append(
        topic=topic,
        partition=partition_of(ordinal, PARTITIONS),
        key=headers.group.encode(),
        value=value,
        headers=header_pairs(headers),
        digest=headers.sha256,
    )


def number_of(trajectory: str) -> int:
    _, ordinal, sample = parse_trajectory_id(trajectory)
    return ordinal * GROUP_SIZE + sample

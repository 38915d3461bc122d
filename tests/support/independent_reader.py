"""Reads a run's trajectories from Kafka with kcat, pyarrow and zstandard; nothing of this project.

It knows what reference/records.md says, and shares no line with the code that it is there to check.
As a program: `python independent_reader.py BROKER TRAJECTORIES_TOPIC CONTROL_TOPIC` prints one
JSON object per trajectory, and one of what the control topic says was logged.
"""

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import zstandard

LIMIT_S = 60


def records(broker: str, topic: str) -> Iterator[tuple[dict[str, Any], bytes]]:
    """(partition, offset, headers) and value of every record that is committed, by kcat."""
    words = ["kcat", "-b", broker, "-C", "-t", topic, "-o", "beginning", "-e", "-q"]
    words += ["-X", "isolation.level=read_committed", "-X", "check.crcs=true"]
    words += ["-f", "%p %o %S %h\n%s\n"]
    done = subprocess.run(words, capture_output=True, timeout=LIMIT_S, check=True)
    stream = io.BytesIO(done.stdout)
    while line := stream.readline():
        partition, offset, size, *headers = line.decode().rstrip("\n").split(" ", 3)
        value = stream.read(int(size))
        assert stream.read(1) == b"\n", "kcat's output is not what was asked for"
        pairs = headers[0].split(",") if headers and headers[0] else []
        named = dict(pair.split("=", 1) for pair in pairs)
        yield {"partition": int(partition), "offset": int(offset), "headers": named}, value


def trajectory(at: dict[str, Any], value: bytes) -> dict[str, Any]:
    """What can be known of one trajectory without its schema: the Arrow stream carries it."""
    with pa.ipc.open_stream(
        zstandard.ZstdDecompressor().decompressobj().decompress(value)
    ) as found:
        table = found.read_all()
    (row,) = table.to_pylist()
    sampled = [i for i, mask in enumerate(row["loss_mask"]) if mask]
    present = [i for i, logprob in enumerate(row["logprobs"]) if logprob is not None]
    return {
        **at,
        "trajectory": row["trajectory"],
        "version": row["version"],
        "digest": row["weights_digest"].hex(),
        "reward": row["reward"],
        "tokens": len(row["token_ids"]),
        "sampled": len(sampled),
        "logprobs_where_sampled": sampled == present,
        "segments_tile": [one["end"] for one in row["segments"]][:-1]
        == [one["start"] for one in row["segments"]][1:],
        "bytes": len(value),
        "sha256": hashlib.sha256(value).hexdigest(),
        "meta": json.loads(row["meta_json"]),
    }


def main() -> None:
    """Print what lies in the two topics."""
    broker, trajectories, control = sys.argv[1:]
    for at, value in records(broker, trajectories):
        sys.stdout.write(json.dumps(trajectory(at, value)) + "\n")
    logged: list[Any] = []
    committed = 0
    for _, value in records(broker, control):
        fact = json.loads(value)
        committed += fact["kind"] == "step-committed"
        if fact["kind"] == "trajectories-logged":
            logged += [{**one, "version": fact["version"]} for one in fact["trajectories"]]
    sys.stdout.write(json.dumps({"logged": logged, "committed": committed}) + "\n")


if __name__ == "__main__":
    main()

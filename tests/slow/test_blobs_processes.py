"""`dora-pipe run` with records above what its topics take, processes and all, on Kafka."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.blobs import BlobBus, blob_of
from dora_pipe.launch.run_dir import opened
from tests.support.kafka_broker import KafkaBroker
from tests.support.user_run import answer, assert_clean, call, furnish, steps

pytest.importorskip("torch")
pytestmark = [pytest.mark.kafka, pytest.mark.slow]

STEPS = 3
RUN = "blobs"
"""A broker has the runs of other tests too."""

RECORD_BYTES_MAX = 64 * 1024
PARTS = 4000
REWARD = f"""
import random
from dora_pipe.producers.tasks.task import Reward

def score(row, text):
    chance = random.Random(text)
    parts = {{}}
    if chance.random() < 0.5:  # 32 characters and a fraction each: nothing compresses them
        parts = {{f"{{chance.getrandbits(128):032x}}": chance.random() for _ in range({PARTS})}}
    return Reward(value=chance.random(), parts=parts)
"""


def furnished(path: Path, url: str) -> Path:
    config = furnish(path) / "config.toml"
    bus = f'[bus]\nmax_record_bytes = {RECORD_BYTES_MAX}\nurl = "{url}"\n'
    named = config.read_text().replace('name = "tiny"', f'name = "{RUN}"')
    config.write_text(named + bus)
    (path / "judge.py").write_text(REWARD)
    return path


def claimed(path: Path, run: str) -> dict[str, str]:
    with opened(str(path / "runs" / run)) as open_run:
        assert isinstance(open_run.bus, BlobBus)
        ends = ends_of(open_run.bus.inner, open_run.topics.trajectories)
        records = records_of(open_run.bus.inner, ends)
        names = (
            (dict(record.headers)["trajectory"].decode(), blob_of(record)) for record in records
        )
        return {name: digest for name, digest in names if digest}


def prove(path: Path) -> int:
    assert call(path, "run", "config.toml") == 0, (path / "said").read_text()
    assert steps(path, RUN) == list(range(STEPS))
    names = claimed(path, RUN)
    values = path / "runs" / RUN / "policies" / "blobs"
    assert len(names) > 5
    assert {path.name for path in values.iterdir()} == set(names.values())
    assert all(path.stat().st_size > RECORD_BYTES_MAX for path in values.iterdir())
    assert_clean(path, RUN)
    assert f"{STEPS} of {STEPS} steps bit-equal" in answer(path, "replay", RUN).stderr
    assert answer(path, "audit", RUN).returncode == 0
    assert answer(path, "export", "parquet", RUN, f"{RUN}.parquet").returncode == 0
    lost = next(name for name in names if name.startswith("g"))
    shown = json.loads(answer(path, "show", RUN, lost, "--json").stdout)
    assert len(json.loads(shown["result"]["reward parts"])) == PARTS
    pruned = answer(path, "prune", RUN, "--blob-hours", "0", "--delete")
    assert (pruned.returncode, pruned.stdout.count("unreferenced")) == (0, 0)
    (values / names[lost]).unlink()
    audited = answer(path, "audit", RUN)
    (error,) = [line for line in audited.stderr.splitlines() if line.startswith("error:")]
    assert audited.returncode == 5
    assert f"{lost} at trajectories:" in error and f"blob {names[lost]}" in error
    return len(names)


def test_run_on_a_broker_with_records_above_the_limit_is_proved(
    tmp_path: Path, kafka_broker: KafkaBroker
) -> None:
    assert prove(furnished(tmp_path, f"kafka://{kafka_broker.bootstrap}")) > 0

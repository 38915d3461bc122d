"""The figures in docs/reference/records.md: what the project's own code makes of the golden bytes.

The page says each formula as an example that needs none of this code; a test runs those, so page
and code are held against each other.
"""

from __future__ import annotations

import importlib.util
import json
import linecache
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from dora_pipe.orchestrator.digest import BUCKETS, PAIRS, TABLES, rest_of
from dora_pipe.orchestrator.rows import RowStats
from dora_pipe.orchestrator.state import State
from dora_pipe.producers.tasks.dataset import DatasetTask
from dora_pipe.producers.tasks.registry import reward_digest, rows_digest
from dora_pipe.schemas import arrow_frame, identity, rounds, wire
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import RunStarted, StepCommitted, decode_control
from dora_pipe.schemas.policy import weights_digest
from dora_pipe.schemas.rounds import STATE_DIGEST_EVERY
from dora_pipe.schemas.routes import ROUTES_BYTES_MAX
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import canonical, sha256_hex
from dora_pipe.store.names import assets_digest
from tests.golden.make import FOLDER, pairs_from_bytes
from tests.golden.state import FOLDER as STATE
from tests.golden.values import FOLDED

IDS: Final = {
    "group": "of the group",
    "request": "of the trajectory",
    "worker": "name of the worker",
    "resident": "name of the worker, if it hosts several versions at once",
    "row": "source of its task, `#`, index: `train/math#17`, where rewards of rows are counted",
}


def state_figures() -> dict[str, Any]:
    """Every name that the text uses in braces."""
    leaves = (STATE / "leaves.jsonl").read_bytes().splitlines()
    values = {kind: value for kind, _, value in map(json.loads, leaves)}
    values["row"] = RowStats.__struct_fields__
    kinds = [f"| `{kind}` | {IDS[kind]} | {_named(values[kind])} |" for kind in TABLES]
    return {
        "state_digest_every": STATE_DIGEST_EVERY,
        "buckets": BUCKETS,
        "kinds": "\n".join(kinds),
        "rest": _named(sorted(rest_of(State()))),
        "pairs": _named(PAIRS),
        "first": [json.loads(one)[:2] for one in leaves[:2]],
        "count": len(leaves),
        "hex": (STATE / "digest.txt").read_text("utf-8").strip(),
    }


def _named(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


RUN_SEED = 7
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "3+4=", "answer": "7"}]
FILES = {"config.json": b"{}", "tokenizer.json": b"[]"}
SOURCE = "def score(row, text):\n    return float(text == row['answer'])\n"


def figures() -> dict[str, Any]:
    """Every name that the texts use in braces."""
    state = (Path(__file__).parent / "records_texts" / "state_digest.md").read_text()
    return {
        "schema_version": wire.SCHEMA_VERSION,
        "json_mib": wire.RECORD_BYTES_MAX >> 20,
        "raw_mib": arrow_frame.RAW_BYTES_MAX >> 20,
        "routes_mib": ROUTES_BYTES_MAX >> 20,
        "level": arrow_frame.COMPRESSION_LEVEL,
        "long_level": arrow_frame.LONG_COMPRESSION_LEVEL,
        "long_kib": arrow_frame.LONG_BYTES_MIN >> 10,
        **_places(),
        **_identity(),
        **_digests(),
        **_sources(),
        "state_digest": state.format(**state_figures()).strip(),
    }


def _places() -> dict[str, Any]:
    pairs = pairs_from_bytes((FOLDER / "trajectories/headers.txt").read_bytes())[:2]
    value = (FOLDER / "trajectories/several-turns.arrow.zst").read_bytes()
    return {
        "at": 4 << 52 | 2 << 40 | 90,
        "headers_hex": msgspec.msgpack.encode(pairs).hex(" "),
        "trajectory": decode_trajectory(value).trajectory,
    }


def _identity() -> dict[str, Any]:
    seed = identity.group_seed(RUN_SEED, "train", 42)
    return {
        "group_seed": seed,
        "trajectory_seed": identity.trajectory_seed(seed, 3),
        "prompts": [identity.prompt_index(RUN_SEED, ordinal, 5) for ordinal in range(7)],
    }


def _digests() -> dict[str, Any]:
    round_ = rounds.decode_round((FOLDER / "decisions/round.json").read_bytes())
    commit = decode_control((FOLDER / "control/step-committed.json").read_bytes())
    started = decode_control((FOLDER / "control/run-started.json").read_bytes())
    assert isinstance(commit, StepCommitted) and isinstance(started, RunStarted)
    first = min(commit.policy.tensors, key=lambda one: one.name)
    line = f"{first.name}\0{first.dtype}\0{','.join(map(str, first.shape))}\0{first.sha256}"
    return {
        "folded": FOLDED.hex(),
        "chain": rounds.chain_of(rounds.GENESIS_CHAIN, FOLDED, round_),
        "batch_digest": batch_digest(commit.groups),
        "weights_line": repr(line[:35]),
        "weights_digest": weights_digest(commit.policy.tensors),
        "config": canonical(started.config).decode(),
        "config_digest": sha256_hex(canonical(started.config)),
    }


def _sources() -> dict[str, Any]:
    """Digests of what is read from files, of files made up here."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in FILES]
        for path in paths:
            path.write_bytes(FILES[path.name])
        assets = assets_digest(paths)
        rewards = reward_digest(_RewardedBy(_module(Path(folder))))
    return {
        "rows_text": b"".join(canonical(row) + b"\n" for row in ROWS).decode(),
        "dataset_digest": rows_digest(ROWS, "train")[0],
        "assets_digest": assets,
        "reward_digest": rewards,
    }


class _RewardedBy(DatasetTask):
    """A task whose reward is decided in one module."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def reward_sources(self) -> tuple[Any, ...]:
        """See Task."""
        return (self._module.score,)


def _module(folder: Path) -> ModuleType:
    """`SOURCE` as a module that Python knows."""
    name = "rewards_of_the_page"
    path = folder / f"{name}.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    linecache.checkcache()  # The page is printed more than once, each time from another folder.
    spec.loader.exec_module(module)
    return module

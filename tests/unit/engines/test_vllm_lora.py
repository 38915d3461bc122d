"""Tests of adapter directories for vLLM and of rejected adapters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.vllm.lora import CLEARING_SCHEDULER, RANKS, arguments, written
from dora_pipe.store.adapters import CONFIG, WEIGHTS
from dora_pipe.store.safetensors_file import TensorSource, read_entries, write_tensors
from tests.support.adapters import RANK, adapter_sources, random_adapter

LAYER = "model.layers.0.self_attn.q_proj"
SHAPES = {"model.embed_tokens.weight": (20, 6), f"{LAYER}.weight": (8, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    folder: Path
    base: tuple[Path, str]

    def adapter(self, seed: int, **changes: Any) -> tuple[Path, str]:
        path = self.folder / f"{seed}-{len(list(self.folder.iterdir()))}"
        digest = str(changes.pop("on", self.base[1]))
        adapter = random_adapter(self.base[0], digest, seed=seed, **changes)
        return path, write_tensors(path, adapter_sources(adapter)).digest


@pytest.fixture
def files(tmp_path: Path) -> Files:
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    manifest = write_tensors(
        tmp_path / "base",
        [
            TensorSource(name=name, dtype="F32", shape=zero.shape, data=zero.tobytes)
            for name, zero in zeros.items()
        ],
    )
    return Files(folder=tmp_path, base=(tmp_path / "base", manifest.digest))


@pytest.mark.parametrize("adapter", [True, False], ids=["an adapter", "the base"])
def test_vllm_reads_what_was_published_and_zeros_for_the_base(files: Files, adapter: bool) -> None:
    path, digest = files.adapter(1) if adapter else files.base
    with written(path, digest=digest, base=files.base[1], rank=RANK, shapes=SHAPES) as folder:
        config = json.loads((Path(folder) / CONFIG).read_text())
        tensors = {entry.name for entry in read_entries(Path(folder) / WEIGHTS)}
    assert config["r"] == RANK and config["lora_alpha"] == (2.0 if adapter else 1.0) * RANK
    assert len(tensors) == 2 and not Path(folder).exists()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"on": "ab" * 32}, "has the base weights abab"),
        ({"rank": 2}, "rank 2, not 4"),
        ({"layers": ("embed_tokens",)}, "no linear layer 'model.embed_tokens'"),
    ],
)
def test_adapter_that_vllm_would_leave_out_or_misread_is_not_shown_to_it(
    files: Files, changes: dict[str, Any], match: str
) -> None:
    path, digest = files.adapter(1, **changes)
    with pytest.raises(PolicyError, match=match):
        written(path, digest=digest, base=files.base[1], rank=RANK, shapes=SHAPES)


def test_other_model_or_digest_is_refused(files: Files) -> None:
    path, digest = files.adapter(1)
    with pytest.raises(PolicyError, match="weights digest"):
        written(path, digest="ab" * 32, base=files.base[1], rank=RANK, shapes=SHAPES)
    other = {f"{LAYER}.weight": (9, 6)}
    with pytest.raises(PolicyError, match="of another model"):
        written(path, digest=digest, base=files.base[1], rank=RANK, shapes=other)


def test_vllm_makes_room_for_the_next_rank_that_it_knows() -> None:
    assert arguments(0, 1, device="cpu") == {}
    for rank, room in ((1, 1), (4, 8), (8, 8), (33, 64), (512, 512)):
        actual_arguments = arguments(rank, 4, device="cuda")
        assert (
            actual_arguments["max_lora_rank"],
            actual_arguments["max_loras"],
            actual_arguments["max_cpu_loras"],
        ) == (room, 4, 5)
        assert actual_arguments["max_lora_rank"] in RANKS
        assert arguments(rank, 4, device="cpu") == actual_arguments | {
            "scheduler_cls": CLEARING_SCHEDULER
        }

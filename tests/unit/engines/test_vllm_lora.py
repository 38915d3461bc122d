"""Which adapters vLLM is given, under which ids, and which it never gets to see; without vLLM."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.port import EngineRequest, SamplingParams
from dora_pipe.producers.engines.vllm.lora import (
    CLEARING_SCHEDULER,
    RANKS,
    LocalHost,
    LoraVersions,
    arguments,
)
from dora_pipe.store.adapters import CONFIG, WEIGHTS, adapter_sources
from dora_pipe.store.safetensors_file import TensorSource, read_entries, write_tensors
from tests.support.adapters import RANK, random_adapter

LAYER = "model.layers.0.self_attn.q_proj"
SHAPES = {"model.embed_tokens.weight": (20, 6), f"{LAYER}.weight": (8, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """As vLLM's LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(slots=True)
class Core:
    """What vLLM holds, and what it found in the directories."""

    held: dict[int, dict[str, Any]] = field(default_factory=dict)
    seen: list[Wanted] = field(default_factory=list)
    refuses: bool = False

    def add_lora(self, wanted: Wanted) -> None:
        self.seen.append(wanted)
        if self.refuses:
            raise ValueError("no\n such adapter")
        folder = Path(wanted.lora_path)
        config = json.loads((folder / CONFIG).read_text())
        self.held[wanted.lora_int_id] = config | {
            "tensors": {one.name for one in read_entries(folder / WEIGHTS)}
        }

    def remove_lora(self, number: int) -> None:
        del self.held[number]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, what, value in (
        ("vllm.lora.request", "LoRARequest", Wanted),
        ("vllm.exceptions", "LoRAAdapterNotFoundError", type("Absent", (Exception,), {})),
    ):
        module = ModuleType(name)
        setattr(module, what, value)
        monkeypatch.setitem(sys.modules, name, module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """A base's digest, and adapters on it: (file, digest)."""

    folder: Path
    base: tuple[Path, str]

    def adapter(self, seed: int, **changes: Any) -> tuple[Path, str]:
        path = self.folder / f"{seed}-{len(list(self.folder.iterdir()))}"
        digest = str(changes.pop("on", self.base[1]))
        made = random_adapter(self.base[0], digest, seed=seed, **changes)
        return path, write_tensors(path, adapter_sources(made)).digest


@pytest.fixture
def files(tmp_path: Path) -> Files:
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    manifest = write_tensors(
        tmp_path / "base",
        [
            TensorSource(name=name, dtype="F32", shape=one.shape, data=one.tobytes)
            for name, one in zeros.items()
        ],
    )
    return Files(folder=tmp_path, base=(tmp_path / "base", manifest.digest))


def residents(core: Core, files: Files, *, most: int = 3) -> LoraVersions:
    found = LoraVersions(LocalHost(core, SHAPES, rank=RANK), most=most)
    found.settle(files.base[0], version=0, digest=files.base[1])
    return found


def request(version: int) -> EngineRequest:
    params = SamplingParams()
    return EngineRequest(
        request="r", token_ids=[1], sampled=0, seed=0, params=params, version=version
    )


def test_every_version_has_an_id_of_its_own_and_the_base_one_of_zeros(files: Files) -> None:
    core = Core()
    held = residents(core, files)
    path, digest = files.adapter(1)
    held.add(path, version=1, digest=digest)
    held.add(files.base[0], version=2, digest=files.base[1])
    assert [held.of(request(version)).number for version in (0, 1, 2, -1)] == [1, 2, 3, 3]
    assert [one.lora_name for one in core.seen] == [
        f"{version}:{of[:16]}" for version, of in enumerate((files.base[1], digest, files.base[1]))
    ]
    assert not any(Path(one.lora_path).exists() for one in core.seen)
    assert core.held[2]["r"] == RANK
    assert core.held[2]["lora_alpha"] == 2.0 * RANK
    assert len(core.held[1]["tensors"]) == 2
    held.drop(1)
    assert core.held.keys() == {1, 3}
    held.add(path, version=1, digest=digest)
    assert held.of(request(1)).number == 4


def test_what_is_resident_is_not_loaded_twice(files: Files) -> None:
    core = Core()
    held = residents(core, files)
    for _ in range(2):
        path, digest = files.adapter(1)
        held.add(path, version=1, digest=digest)
    assert len(core.seen) == 2
    assert not held.replaces(1, digest)
    assert held.replaces(1, "other")


@pytest.mark.parametrize("most", [1, 3])
def test_refused_adapter_leaves_what_was_there(files: Files, most: int) -> None:
    core = Core()
    held = residents(core, files, most=most)
    core.refuses = True
    path, digest = files.adapter(1)
    with pytest.raises(PolicyError, match="vLLM cannot load this adapter: no such adapter"):
        held.add(path, version=1, digest=digest)
    assert held.of(request(0)).number == 1
    with pytest.raises(ValueError, match="version 1 is not resident"):
        held.of(request(1))
    core.refuses = False
    held.add(path, version=1, digest=digest)
    assert held.of(request(1)).number == 3
    assert len(core.held) == min(most, 2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"on": "ab" * 32}, "stands on weights abab"),
        ({"rank": 2}, "rank 2, not 4"),
        ({"layers": ("embed_tokens",)}, "no linear layer 'model.embed_tokens'"),
    ],
)
def test_adapter_that_vllm_would_leave_out_or_misread_is_not_shown_to_it(
    files: Files, changes: dict[str, Any], match: str
) -> None:
    core = Core()
    held = residents(core, files)
    path, digest = files.adapter(1, **changes)
    with pytest.raises(PolicyError, match=match):
        held.add(path, version=1, digest=digest)
    assert len(core.seen) == 1


def test_other_model_or_digest_is_refused(files: Files) -> None:
    core = Core()
    held = residents(core, files)
    path, digest = files.adapter(1)
    with pytest.raises(PolicyError, match="weights digest"):
        held.add(path, version=1, digest="ab" * 32)
    other = LoraVersions(LocalHost(core, {f"{LAYER}.weight": (9, 6)}, rank=RANK), most=3)
    other.base = files.base[1]
    with pytest.raises(PolicyError, match="of another model"):
        other.add(path, version=1, digest=digest)


def test_there_is_room_for_so_many_and_a_new_base_takes_them_away(files: Files) -> None:
    core = Core()
    held = residents(core, files)
    for version in (1, 2):
        path, digest = files.adapter(version)
        held.add(path, version=version, digest=digest)
    path, digest = files.adapter(3)
    with pytest.raises(ValueError, match="3 versions are resident; drop one first"):
        held.add(path, version=3, digest=digest)
    assert not held.is_whole(path, digest)
    assert not held.is_whole(*files.base)
    assert held.is_whole(files.base[0], "ab" * 32)
    held.settle(files.base[0], version=0, digest="ab" * 32)
    assert core.held.keys() == {4}


def test_vllm_makes_room_for_the_next_rank_that_it_knows() -> None:
    assert arguments(0, 1, device="cpu") == {}
    for rank, room in ((1, 1), (4, 8), (8, 8), (33, 64), (512, 512)):
        found = arguments(rank, 4, device="cuda")
        assert (found["max_lora_rank"], found["max_loras"], found["max_cpu_loras"]) == (room, 4, 5)
        assert found["max_lora_rank"] in RANKS
        assert arguments(rank, 4, device="cpu") == found | {"scheduler_cls": CLEARING_SCHEDULER}


def test_without_a_rank_every_request_runs_under_the_one_version(files: Files) -> None:
    held = LoraVersions()
    assert held.is_whole(*files.adapter(1))
    held.settle(files.base[0], version=7, digest=files.base[1])
    assert (held.of(request(7)).number, held.of(request(-1)).adapter) == (0, None)
    assert (held.most, held.adapters) == (1, False)

"""Tests of errors when a trainer is created."""

import importlib.util
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from dora_pipe.config.model import Config, Lora
from dora_pipe.config.outside import Policies
from dora_pipe.config.training import Trainer as Section
from dora_pipe.consumers.learners import registry as make
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.core.errors import ConfigError
from tests.support.configs import plain_config, small_config


def _config(**trainer: object) -> Config:
    return msgspec.convert(plain_config(trainer=trainer), Config)


def test_absent_deepspeed_is_one_line_with_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else there(name)
    )
    with pytest.raises(ConfigError, match="needs deepspeed, which is not installed") as caught:
        make.make_learner(assets=tmp_path, reference=tmp_path, config=_config(kind="deepspeed"))
    assert "make deepspeed" in str(caught.value.hint)
    make.need_learner(_config(kind="torch"))


def test_bfloat16_is_published_where_the_trainer_can_and_refused_by_name_where_it_cannot() -> None:
    policies = Policies(dtype="bfloat16")
    for kind in ("torch", "deepspeed"):
        config = _config(kind=kind)
        assert make.published_dtype(config, "bfloat16") == "bfloat16"
        assert make.published_dtype(config, "float16") == "float32"
        adapted = msgspec.structs.replace(config, lora=Lora(rank=2))
        assert make.published_dtype(adapted, "bfloat16") == "bfloat16"
    wide = msgspec.structs.replace(_config(), policies=Policies(dtype="float32"))
    assert make.published_dtype(wide, "bfloat16") == "float32"
    with pytest.raises(ConfigError, match=r"policies\.dtype: trainer `own:TRAINER`"):
        own = SimpleNamespace(TRAINER=make.LearnerKind(open=_nothing))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "own", own)
            make.need_learner(
                msgspec.structs.replace(_config(kind="own:TRAINER"), policies=policies)
            )


def _nothing(*given: Any) -> Any:
    raise AssertionError(given)


def test_absent_gpu_is_one_line_where_one_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kind in ("torch", "deepspeed"):
        with pytest.raises(ConfigError, match="torch finds no GPU here") as caught:
            make.device_of(Section(kind=kind, device="cuda"))
        assert "trainer.device=cpu" in str(caught.value.hint)
        assert make.device_of(Section(kind=kind)) == "cpu"


@pytest.mark.parametrize("kind", ["torch", "deepspeed"])
def test_activations_of_a_trainer_on_a_cpu_are_in_the_hosts_memory_anyway(kind: str) -> None:
    keys: dict[str, Any] = {"gradient_checkpointing": "offload"}
    section = Section(kind=kind, device="cpu", **keys)
    config = msgspec.structs.replace(_config(kind=kind), trainer=section)
    with pytest.raises(ConfigError, match="trainer on the CPU") as caught:
        make.BUILT_IN[kind].open(Path("a"), Path("w"), config, None)
    assert "trainer.device" in str(caught.value.hint)


@pytest.mark.parametrize("kind", ["torch", "deepspeed"])
def test_a_trainer_on_a_cpu_has_no_device_to_leave_between_steps(kind: str) -> None:
    section = Section(kind=kind, device="cpu", offload_between_steps=True)
    config = msgspec.structs.replace(_config(kind=kind), trainer=section)
    with pytest.raises(ConfigError, match=r"trainer\.offload_between_steps: not supported"):
        make.BUILT_IN[kind].open(Path("a"), Path("w"), config, None)


def test_a_run_in_parts_computes_beside_what_would_leave_the_device() -> None:
    section = Section(kind="torch", batch_parts=4, offload_between_steps=True)
    config = msgspec.structs.replace(_config(kind="torch"), trainer=section)
    with pytest.raises(ConfigError, match=r"trainer\.batch_parts = 4"):
        make.need_learner(config)


@pytest.mark.parametrize("kind", ["torch", "deepspeed"])
def test_a_gpu_is_used_unless_the_cpu_is_asked_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make.device_of(Section(kind=kind)) == "cuda"
    assert make.device_of(Section(kind=kind, device="cuda")) == "cuda"
    assert make.device_of(Section(kind=kind, device="cpu")) == "cpu"


@pytest.mark.parametrize("rank", ["", "0"])
def test_process_that_was_not_started_as_another_rank_is_the_trainer(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dora_pipe.store.log_location import LogLocation
    from dora_pipe.store.store import PolicyStore

    log, store = LogLocation(run="r", url=f"sqlite:{tmp_path}/x"), PolicyStore(tmp_path)
    monkeypatch.setenv("RANK", rank)
    assert not make.follows(_config(kind="deepspeed"), log, store)
    monkeypatch.setenv("RANK", "1")
    assert not make.follows(_config(kind="torch"), log, store)


OWN = """
from dataclasses import dataclass
from dora_pipe.consumers.learners.registry import LearnerKind
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.objectives.grpo import grpo
from dora_pipe.consumers.objectives.registry import ObjectiveKind

@dataclass(frozen=True)
class Options:
    beta: float = 1.0
    def __post_init__(self):
        if self.beta < 0:
            raise ValueError("beta is below 0")

MINE = ObjectiveKind(terms=grpo, options=Options)
TRAINER = LearnerKind(open=lambda assets, reference, config, log: SimulatedLearner())
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("nowhere\n")
    yield tmp_path
    sys.modules.pop("mine", None)


def _own(folder: Path, *, options: dict[str, Any] | None = None, **kinds: str) -> Config:
    objective: dict[str, Any] = {
        "kind": kinds.get("objective", "mine:MINE"),
        "options": options or {},
    }
    if "every" in kinds:
        objective |= {"kl_coef": 0.1, "reference_every": int(kinds["every"])}
    task = {"kind": "arithmetic", "directory": str(folder)}
    trainer = {"kind": kinds.get("trainer", "torch")}
    return small_config(task=task, trainer=trainer, objective=objective)


@pytest.mark.parametrize(
    ("wrong", "text", "hint"),
    [
        ({"objective": "none"}, "objective.kind: no objective `none`", "module:attribute"),
        ({"objective": "gspoo"}, "objective.kind: no objective `gspoo`", "`gspo`"),
        ({"objective": "nowhere:X"}, "objective.kind: cannot import `nowhere`", "task.directory"),
        ({"objective": "broken:X"}, "objective.kind: cannot import `broken`: name", "first"),
        ({"objective": "mine:MINES"}, "objective.kind: `mine` has no `MINES`", "`MINE`"),
        (
            {"objective": "mine:TRAINER"},
            "is a LearnerKind, expected ObjectiveKind",
            "docs/training.md",
        ),
        (
            {"options": {"bta": 1}},
            "objective.options.bta: mine:MINE has no such option",
            "are beta",
        ),
        ({"options": {"beta": "x"}}, "objective.options.beta: expected `float`, got `str`", ""),
        ({"options": {"beta": -1.0}}, "objective.options: beta is below 0", ""),
        ({"options": {"beta": [1]}}, "objective.options", ""),
        ({"objective": "grpo", "options": {"beta": 1}}, "kind `grpo` does not use it", "own"),
        ({"trainer": "trch"}, "trainer.kind: there is no `trch`", "`torch`"),
        ({"trainer": "mine:Trainer"}, "trainer.kind: `mine` has no `Trainer`", ""),
        ({"trainer": "mine:MINE"}, "expected LearnerKind", "training.md"),
        ({"trainer": "mine:TRAINER", "every": "5"}, "reference_every: trainer", "moving_reference"),
    ],
)
def test_wrong_module_attribute_key_or_value_of_ones_own_is_one_line(
    own: Path, wrong: dict[str, Any], text: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make.need_learner(_own(own, **wrong))
    assert text in caught.value.message and "\n" not in caught.value.message
    assert hint in f"{caught.value.message} {caught.value.hint}"


def test_trainer_of_ones_own_is_opened_and_its_source_is_in_the_fingerprint(own: Path) -> None:
    config = _own(own, trainer="mine:TRAINER")
    learner = make.make_learner(assets=own, reference=own, config=config)
    source = sha256((own / "mine.py").read_bytes()).hexdigest()
    assert learner.name == "simulated"
    assert learner.numerics() == {
        **SimulatedLearner().numerics(),
        "trainer source": f"mine:TRAINER {source}",
        "objective source": f"mine:MINE {source}",
    }
    assert str(own) not in sys.path

"""What machines have of versions that are patches, what befalls it, and what is noticed of it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from dora_pipe.consumers.learners.port import TrainBatch
from dora_pipe.consumers.learners.simulated import WEIGHTS_BYTES, SimulatedLearner, initial_weights
from dora_pipe.core.errors import InvariantBroken, PolicyError
from dora_pipe.sim.machines import HAD, Machines
from dora_pipe.sim.role import WorldClock
from dora_pipe.store.patch import opened_patches, write_patch, write_patched
from dora_pipe.store.store import PolicyStore
from tests.support.stores import publish_walk

WHOLE_EVERY = 4


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    return PolicyStore(tmp_path / "policies")


@pytest.fixture
def digests(store: PolicyStore) -> list[str]:
    found = publish_walk(store, WHOLE_EVERY, whole_every=WHOLE_EVERY)
    return [one.manifest.digest for one in found]


def machines_of(store: PolicyStore, tmp_path: Path, *, apart: bool = True) -> Machines:
    return Machines(store, tmp_path / "machines", WorldClock(), apart=apart)


def test_a_worker_several_versions_behind_applies_several_patches(
    store: PolicyStore, digests: list[str], tmp_path: Path
) -> None:
    machines = machines_of(store, tmp_path)
    for version in (0, 1, 3):
        assert machines.of("w0").verify(digests[version]).digest == digests[version]
    assert dict(machines.counted) == dict.fromkeys(HAD, 1)


def test_where_all_versions_are_whole_there_is_one_machine(
    store: PolicyStore, tmp_path: Path
) -> None:
    assert machines_of(store, tmp_path, apart=False).of("w0") is store


def test_a_version_without_what_it_is_made_of_cannot_be_had(
    store: PolicyStore, digests: list[str], tmp_path: Path
) -> None:
    machines = machines_of(store, tmp_path)
    assert all(machines.can_be_had(one) for one in digests)
    store.drop_patch(digests[1])
    assert [machines.can_be_had(one) for one in digests] == [True, False, False, False]


def test_what_was_lost_and_damaged_on_a_machine_comes_from_the_store_again(
    store: PolicyStore, digests: list[str], tmp_path: Path
) -> None:
    machines, chance = machines_of(store, tmp_path), Random(3)
    assert not machines.damage("w0", chance)
    machines.of("w0").weights(digests[2])
    assert machines.damage("w0", chance) and machines.lose("w0", chance)
    assert machines.of("w0").verify(digests[2]).digest == digests[2]


def test_a_worker_that_cannot_have_what_the_store_has_is_a_finding(
    store: PolicyStore, digests: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = machines_of(store, tmp_path)
    machines.of("w0").weights(digests[1])
    machines.damage("w0", Random(3))
    monkeypatch.setattr(PolicyStore, "patch", lambda self, one: self.root / f"patches/{one}.patch")
    with pytest.raises(InvariantBroken, match="kept: w0 cannot have"):
        machines.of("w0").weights(digests[1])


def test_a_step_of_the_simulated_learner_changes_one_of_the_sparse_elements(tmp_path: Path) -> None:
    files = [tmp_path / f"{version}.safetensors" for version in range(3)]
    digests = [initial_weights(files[0], sparse=64).digest]
    learner = SimulatedLearner()
    learner.load(files[0], digest=digests[0], optimizer=None)
    for step, path in enumerate(files[1:]):
        learner.train(TrainBatch(step=step, groups=()), {})
        digests.append(learner.save_weights(path).digest)
        assert learner.manifest().digest == digests[-1]
    again = SimulatedLearner()
    again.load(files[1], digest=digests[1], optimizer=None)
    assert again.manifest().digest == digests[1]
    patch = tmp_path / "patch"
    change = write_patch(
        patch, files[1], files[2], digest_before=digests[1], digest_after=digests[2]
    )
    assert change.changed <= WEIGHTS_BYTES + 1
    with opened_patches([patch]) as patches, pytest.raises(PolicyError, match="does not make"):
        write_patched(tmp_path / "wrong", files[0], patches)

"""The version of another run that a new one starts from: its weights, and its optimizer's state
where that is wanted. It trains nothing: what is not kept any more is refused by name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.registry import published_dtype
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import typed
from dora_pipe.core.errors import ConfigError, PolicyError, UsageError
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.observe.lineage import policy_after
from dora_pipe.schemas.control import Lineage, RunStarted
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.store.adapters import base_of, read_adapter, write_merged
from dora_pipe.store.model_dir import write_as
from dora_pipe.store.safetensors_file import refuse_non_finite_file
from dora_pipe.store.store import PolicyStore

OF_STATE: Final = ("trainer.kind", "trainer.optimizer", "trainer.dtype")
"""Keys by which a state of the one run is one of the other."""


def inherit(
    parent: str, root: Path, target: PolicyStore, config: Config, *, with_optimizer: bool = False
) -> tuple[Lineage, tuple[Manifest, str]]:
    """Bring the policy of RUN@STEP into the new run's store, in the type that this publishes.

    Raises UsageError, ConfigError, PolicyError for what is not there, is another run's, or is no
    state of this run's optimizer; BusError.
    """
    name, at, step = parent.rpartition("@")
    if not at or not step.isdigit():
        raise UsageError(f"not RUN@STEP: {parent!r}", hint="e.g. --from demo@40")
    with opened(name, root) as old:
        first, _ = policy_after(old.bus, old.topics, 0)
        _check_trained_here(first, int(step))
        _, manifest = policy_after(old.bus, old.topics, int(step))
        source = old.policies
        if not source.has_weights(manifest.digest):  # Training is not for the process that forks.
            raise PolicyError(
                f"version {step} of {name} is not in its store any more",
                hint="make it again first: "
                + typed("export", "policy", name, step, "DIR", runs=root),
            )
        source.verify(manifest.digest)
        refuse_non_finite_file(source.weights(manifest.digest))
        parent_digest = manifest.digest
        dtype = published_dtype(config, manifest.dtype)
        state = None
        if with_optimizer:
            _check_state_fits(first, config, name, same_dtype=dtype == manifest.dtype)
            state = _state(old, first, int(step), root, target)
        manifest = target.publish_weights(_whole(source, manifest))
        if dtype != manifest.dtype:
            copied = manifest.digest
            again = partial(write_as, target.weights(copied), dtype)
            manifest = target.publish_weights(again)
            target.drop_weights(copied)
        files = sorted(source.assets(first.assets_digest).iterdir())
        assets = target.publish_assets(files)
    lineage = Lineage(run=first.run, step=int(step), digest=parent_digest, optimizer=state)
    return lineage, (manifest, assets)


def _check_trained_here(first: RunStarted, version: int) -> None:
    """Raises UsageError for a version before the first one of a run that was trained again: under
    its number the log has the source's, and who asks may mean what the run began with."""
    again = first.retrained
    if again is not None and version < again.first:
        raise UsageError(
            f"run {first.run} begins with version {again.first} of {again.run}, and has no "
            f"version {version} of its own",
            hint=f"--from {first.run}@{again.first} is what it began with, "
            f"--from {again.run}@{version} that version",
        )


def _check_state_fits(first: RunStarted, config: Config, name: str, *, same_dtype: bool) -> None:
    """Raises ConfigError where a state of that run is none of this one's optimizer."""
    theirs, hint = logged_config(first.config), "without --with-optimizer it begins afresh"
    if theirs.lora.rank or config.lora.rank:
        raise ConfigError(
            f"{name}: the optimizer's state of an adapter is none of the weights that it is merged "
            "into",
            hint=hint,
        )
    for key in OF_STATE:
        _, _, field = key.partition(".")
        there, here = getattr(theirs.trainer, field), getattr(config.trainer, field)
        if there != here:
            raise ConfigError(
                f"{name}: its optimizer's state is of {key} = {there!r}, and this run has {here!r}",
                hint=hint,
            )
    if not same_dtype:
        raise ConfigError(
            f"{name}: its optimizer's state is of weights of another type (policies.dtype)",
            hint=hint,
        )


def _state(old: OpenRun, first: RunStarted, step: int, root: Path, target: PolicyStore) -> Blob:
    """The optimizer's state of a version, in the new run's store."""
    history = read_history(old.bus, old.topics, SystemClock())
    kept, source = history.checkpoint(step), old.policies
    if kept is None or not source.has_blob("optimizer", kept.sha256):
        raise PolicyError(
            f"the optimizer's state of version {step} of {first.run} is not in its store",
            hint=_hint(old, history.next_step, step, first, root, history.checkpoint),
        )
    return copy_state(source, target, kept.sha256)


def _hint(
    old: OpenRun,
    newest: int,
    step: int,
    first: RunStarted,
    root: Path,
    checkpoint: Callable[[int], Blob | None],
) -> str:
    """How to come by a state."""
    if step == 0:
        return "version 0 begins with a fresh one: leave --with-optimizer out"
    if first.retrained is None:
        words = ("retrain", first.run, "--name", "NEW", "--from", str(step - 1), "--to", str(step))
        return f"make it again first: {typed(*words, runs=root)}; then --from NEW@{step}"
    blobs = ((version, checkpoint(version)) for version in range(newest + 1))
    there = [
        str(version)
        for version, blob in blobs
        if blob is not None and old.policies.has_blob("optimizer", blob.sha256)
    ]
    return f"there is one of {', '.join(there) or 'none'}"


def copy_state(source: PolicyStore, target: PolicyStore, sha256: str) -> Blob:
    """An optimizer's state of one store in another one. Raises PolicyError, ResourceError."""
    path = source.verify_blob("optimizer", sha256)

    def write(final: Path) -> None:
        shutil.copyfile(path, final)

    return target.publish_blob("optimizer", write)


def copying(source: Path, manifest: Manifest) -> Callable[[Path], Manifest]:
    """Writes weights as a file has them; see `PolicyStore.publish_weights`."""

    def write(target: Path) -> Manifest:
        shutil.copyfile(source, target)
        return manifest

    return write


def _whole(source: PolicyStore, manifest: Manifest) -> Callable[[Path], Manifest]:
    """Writes the weights of a policy; those of an adapter merged into what it stands on."""
    weights = source.weights(manifest.digest)
    base = base_of(weights)
    if base is None:
        return copying(weights, manifest)
    source.verify(base)
    adapter = read_adapter(weights, digest=manifest.digest)
    return lambda path: write_merged(source.weights(base), adapter, path)

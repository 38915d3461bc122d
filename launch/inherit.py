"""Start a run from a version of another run, or from a directory that `retrain` wrote."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.registry import published_dtype
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.errors import ConfigError, PolicyError, UsageError
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import typed
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.observe.lineage import first_record, policy_after
from dora_pipe.schemas.control import Lineage, RunStarted
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.store.adapters import base_of, read_adapter, write_merged
from dora_pipe.store.model_dir import config_dtype, import_model, write_as
from dora_pipe.store.safetensors_file import refuse_non_finite_file
from dora_pipe.store.store import PolicyStore

OF_STATE: Final = ("trainer.kind", "trainer.optimizer", "trainer.dtype", "lora.rank")
"""Keys that must match to reuse an optimizer state."""

CHANGE: Final = "change.json"
OPTIMIZER: Final = "optimizer.safetensors"


class RetrainedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Source of the weights in a retrained directory: its `change.json`."""

    run: str
    started_ns: int
    """`at_ns` of its `run started`; distinguishes runs of the same name."""
    log_chain: str
    first: int
    last: int
    change: dict[str, Any]
    change_digest: str
    weights: str
    trainer: dict[str, Any]
    package: str


def state_keys(config: Config) -> dict[str, Any]:
    sections = {"trainer": config.trainer, "lora": config.lora}
    keys = (key.split(".") for key in OF_STATE)
    return {f"{section}.{field}": getattr(sections[section], field) for section, field in keys}


def inherit(
    parent: str, root: Path, target: PolicyStore, config: Config, *, with_optimizer: bool = False
) -> tuple[Lineage, tuple[Manifest, str]]:
    """Copy the policy of RUN@STEP or of a retrained directory into a new run's store and dtype.

    Raises UsageError or ConfigError for an incompatible source, PolicyError, BusError.
    """
    if (Path(parent) / CHANGE).is_file():
        return _inherit_directory(Path(parent), target, config, with_optimizer=with_optimizer)
    name, separator, step = parent.rpartition("@")
    if not separator or not step.isdigit():
        raise UsageError(
            f"{parent!r} is neither RUN@STEP nor a directory that `retrain` wrote",
            hint="e.g. --from demo@40",
        )
    with opened(name, root) as old:
        first = first_record(old.bus, old.topics)
        manifest = policy_after(old.bus, old.topics, int(step))
        source = old.policies
        if not source.has_weights(manifest.digest):  # rebuilding needs training
            raise PolicyError(
                f"version {step} of {name} is no longer in its store",
                hint="rebuild it first: " + typed("export", "policy", name, step, "DIR", runs=root),
            )
        source.verify(manifest.digest)
        refuse_non_finite_file(source.weights(manifest.digest))
        parent_digest = manifest.digest
        dtype = published_dtype(config, manifest.dtype)
        state = None
        if with_optimizer:
            theirs = state_keys(logged_config(first.config))
            _check_state_fits(theirs, config, name, same_dtype=dtype == manifest.dtype)
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


def _inherit_directory(
    directory: Path, target: PolicyStore, config: Config, *, with_optimizer: bool
) -> tuple[Lineage, tuple[Manifest, str]]:
    try:
        model = msgspec.json.decode((directory / CHANGE).read_bytes(), type=RetrainedModel)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{directory / CHANGE} cannot be read: {error}") from error
    dtype, state = published_dtype(config, config_dtype(directory)), None
    policy = import_model(target, directory, dtype)
    if with_optimizer:
        same_dtype = policy[0].digest == model.weights
        _check_state_fits(model.trainer, config, str(directory), same_dtype=same_dtype)
        file = directory / OPTIMIZER
        if not file.is_file():
            raise PolicyError(f"{directory} has no {OPTIMIZER}", hint="run retrain again")
        state = target.publish_blob("optimizer", partial(shutil.copyfile, file))
    lineage = Lineage(run=model.run, step=model.last + 1, digest=model.weights, optimizer=state)
    return lineage, policy


def _check_state_fits(
    theirs: Mapping[str, Any], config: Config, name: str, *, same_dtype: bool
) -> None:
    hint, own = "without --with-optimizer the optimizer state starts empty", state_keys(config)
    if theirs["lora.rank"] or own["lora.rank"]:
        raise ConfigError(
            f"{name}: an adapter's optimizer state does not fit the merged weights",
            hint=hint,
        )
    for key in OF_STATE:
        if theirs[key] != own[key]:
            raise ConfigError(
                f"{name}: its optimizer state has {key} = {theirs[key]!r}, "
                f"and this run has {own[key]!r}",
                hint=hint,
            )
    if not same_dtype:
        raise ConfigError(
            f"{name}: its optimizer state has another weight type (policies.dtype)",
            hint=hint,
        )


def _state(old: OpenRun, first: RunStarted, step: int, root: Path, target: PolicyStore) -> Blob:
    kept = read_history(old.bus, old.topics, SystemClock()).checkpoint(step)
    if kept is None or not old.policies.has_blob("optimizer", kept.sha256):
        again = typed("retrain", first.run, "--out", "DIR", "--to", str(step), runs=root)
        raise PolicyError(
            f"the optimizer state of version {step} of {first.run} is not in its store",
            hint=f"rebuild it first: {again}; then --from DIR --with-optimizer"
            if step
            else "version 0 has none: remove --with-optimizer",
        )
    path = old.policies.verify_blob("optimizer", kept.sha256)
    return target.publish_blob("optimizer", partial(shutil.copyfile, path))


def _whole(source: PolicyStore, manifest: Manifest) -> Callable[[Path], Manifest]:
    weights = source.weights(manifest.digest)
    base = base_of(weights)
    if base is None:
        return partial(_copied, weights, manifest)
    source.verify(base)
    adapter = read_adapter(weights, digest=manifest.digest)
    return partial(write_merged, source.weights(base), adapter)


def _copied(source: Path, manifest: Manifest, target: Path) -> Manifest:
    shutil.copyfile(source, target)
    return manifest

"""Weights & Biases, where it is installed; it decides that nothing leaves the machine unasked.

Offline unless WANDB_MODE says otherwise; `wandb sync` sends it later. A row's own number is W&B's
step, since that may never fall, and the training step is the axis of all charts. Which rows are
there says W&B's server when it is asked, and otherwise a file beside W&B's own.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.observe.traces.follow import Checkpoint
from dora_pipe.observe.trackers.port import Figure, Spread, TrackedRun

MODE: Final = "WANDB_MODE"
OFFLINE: Final = "offline"
ONLINE: Final = "online"
OFFLINE_MODES: Final = frozenset({OFFLINE, "dryrun"})
"""`dryrun` is what W&B called it once."""

STEP: Final = "step"
"""The figure that is the axis of all others."""

QUIET: Final = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_DISABLE_STATS": "true",
}
"""Unless the user says otherwise: this process is not the run, so its output, its code and what it
costs the machine say nothing of it; and errors of W&B's are not sent to W&B."""


class WandbTracker:
    """A project of W&B. Example: ``WandbTracker("arithmetic")``.

    Raises UsageError where the package is missing, and for what is no name of a project.
    """

    def __init__(self, project: str, environment: MutableMapping[str, str] | None = None) -> None:
        if not project or "/" in project:
            raise UsageError(
                f"{project!r} is no name of a project", hint="WANDB_ENTITY names a team"
            )
        self._environment = os.environ if environment is None else environment
        for name, value in QUIET.items():
            self._environment.setdefault(name, value)
        self._wandb = _package()
        self._project = project
        self._run: Any = None
        self._rows = 0
        self._checkpoint = Checkpoint(None)

    def begin(self, run: TrackedRun) -> int:
        """See the port. Raises ResourceError for what W&B refuses."""
        mode = self._environment.get(MODE, OFFLINE)
        folder = Path(self._environment.get("WANDB_DIR", "."))
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}", hint="WANDB_DIR names it")
        try:
            self._run = self._wandb.init(
                project=self._project,
                id=run.id,
                name=run.name,
                config=dict(run.config),
                mode=mode,
                dir=str(folder),
                resume="allow" if mode == ONLINE else None,
            )
        except self._wandb.Error as error:
            raise ResourceError(f"W&B: {error}", hint=f"{MODE}=offline needs nobody") from None
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        if mode in OFFLINE_MODES:
            self._checkpoint = Checkpoint(
                folder / "wandb" / f"dora-pipe-{self._project}-{run.id}.rows"
            )
            self._rows = max(0, self._checkpoint.read())
        else:
            self._rows = int(self._run.starting_step)
        return self._rows

    def step(self, step: int, figures: Mapping[str, Figure], *, at_ns: int) -> None:
        """See the port; W&B has its own idea of when it was."""
        assert self._run is not None, "a row before `begin`"
        values = {name: self._value(figure) for name, figure in figures.items()}
        try:
            self._run.log({STEP: step, **values}, step=self._rows, commit=True)
        except self._wandb.Error as error:
            raise ResourceError(f"W&B: {error}") from None
        self._rows += 1
        self._checkpoint.write(self._rows)

    def close(self) -> None:
        """See the port."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _value(self, figure: Figure) -> Any:
        """A number, or a histogram with a bin for every value."""
        if not isinstance(figure, Spread):
            return figure
        first, last = figure.counts[0][0], figure.counts[-1][0]
        counts = [dict(figure.counts).get(value, 0) for value in range(first, last + 1)]
        edges = [value - 0.5 for value in range(first, last + 2)]
        return self._wandb.Histogram(np_histogram=(counts, edges))


def _package() -> ModuleType:
    """The user's own installation. Raises UsageError."""
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed", hint="pip install wandb") from None

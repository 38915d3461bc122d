"""Learner on DeepSpeed: ZeRO over several ranks, rank 0 in the role's process."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from contextlib import redirect_stdout
from typing import Any, Final

from dora_pipe.core.errors import ConfigError, install_hint

NAME: Final = "deepspeed"
HINT: Final = f"make deepspeed, or {install_hint('deepspeed', options='--no-build-isolation ')}"

SHARED_MEMORY: Final = "deepspeed_shm_comm"
"""Disabled: compiles at run time, and sums in another order than gloo."""

CUBLAS: Final = ":4096:8"
"""Workspace for deterministic matrix products; CUDA reads it once at startup."""


def prepare(device: str) -> None:
    """Set environment that torch and DeepSpeed read at startup; `device` is `cpu` or `cuda[:N]`."""
    os.environ["DS_ACCELERATOR"] = device.partition(":")[0]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS)


def import_deepspeed(device: str) -> Any:
    """Import DeepSpeed on torch's process group. Raises ConfigError."""
    prepare(device)
    try:
        with redirect_stdout(sys.stderr):  # its logger keeps the stdout it finds
            deepspeed = importlib.import_module(NAME)
            ops = importlib.import_module(f"{NAME}.ops")
    except ModuleNotFoundError as error:
        raise absent(error.name or NAME) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").propagate = False
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    ops.__compatible_ops__[SHARED_MEMORY] = False
    backend = "gloo" if device == "cpu" else "nccl"
    deepspeed.init_distributed(dist_backend=backend, verbose=False, auto_mpi_discovery=False)
    return deepspeed


def absent(name: str) -> ConfigError:
    """Return the error of a missing package."""
    return ConfigError(
        f"trainer.kind = 'deepspeed' needs {name}, which is not installed", hint=HINT
    )

"""The learner on DeepSpeed: ZeRO over several ranks, of which rank 0 is in the role's process.

Here DeepSpeed is imported, and what of its environment is ours: device, talk, what it compiles.
"""

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
"""A collective of its own for CPUs: it needs a compiler at run time, and adds up in another order
than gloo does."""

CUBLAS: Final = ":4096:8"
"""Work space with which matrix products are deterministic; CUDA reads it once, when it starts."""


def prepare(device: str) -> None:
    """Set what is read when torch and DeepSpeed start; `device` is `cpu` or `cuda`, `:N` or not."""
    os.environ["DS_ACCELERATOR"] = device.partition(":")[0]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS)


def import_deepspeed(device: str) -> Any:
    """DeepSpeed, joined to torch's process group, which exists. Raises ConfigError without it."""
    prepare(device)
    try:
        with redirect_stdout(sys.stderr):  # its logger keeps what it finds there
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
    """What is said where a package is missing."""
    return ConfigError(
        f"trainer.kind = 'deepspeed' needs {name}, which is not installed", hint=HINT
    )

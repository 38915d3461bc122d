"""Asynchronous RL post-training over a log; this name re-exports what users may rely on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dora_pipe.core.errors import DoraError

if TYPE_CHECKING:
    __version__: str
    """As installed; "0+unknown" when imported from a tree that is not."""

# MKL chooses a kernel by the number of rows, and on some processors the rows of a short product
# have other last digits than the same rows of a long one; in its strict mode they do not
# (docs/decisions/0007). It reads this at its first product; a value set by the user wins.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

__all__ = ["DoraError", "__version__"]


def __getattr__(name: str) -> str:
    """The version, looked up when it is first asked for: importlib.metadata takes 20 ms."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("dora-pipe")
    except PackageNotFoundError:
        number = "0+unknown"
    globals()[name] = number
    return number

"""Asynchronous RL post-training over a log; this name re-exports what users may rely on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from dora_pipe.errors import DoraError

try:
    __version__ = version("dora-pipe")
except PackageNotFoundError:
    __version__ = "0+unknown"
    """Imported from a tree that is not installed."""

__all__ = ["DoraError", "__version__"]

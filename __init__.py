"""Asynchronous RL post-training over a log; this name re-exports what users may rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_pipe.core.errors import DoraError

if TYPE_CHECKING:
    __version__: str
    """As installed; "0+unknown" when imported from a tree that is not."""

__all__ = ["DoraError", "__version__"]


def __getattr__(name: str) -> str:
    """The version, looked up when it is first asked for: importlib.metadata takes 20 ms."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("dora-pipe")
    except PackageNotFoundError:
        found = "0+unknown"
    globals()[name] = found
    return found

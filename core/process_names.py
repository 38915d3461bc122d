"""How processes of a run are called in `ps` and `top`: each by its role, not all by one command."""

from __future__ import annotations

from typing import Final

from dora_pipe.core.errors import printable

PREFIX: Final = "dora-pipe "


def name_process(*words: str) -> None:
    """Call this process so. Example: ``name_process("worker", "w0", "demo")`` shows
    ``dora-pipe worker w0 demo``."""
    from setproctitle import setproctitle

    setproctitle(PREFIX + printable(" ".join(words)))


def own_name() -> str:
    """What this process was called without `dora-pipe`; empty where it has no name of its own."""
    from setproctitle import getproctitle

    title = getproctitle()
    return title.removeprefix(PREFIX) if title.startswith(PREFIX) else ""

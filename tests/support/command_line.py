"""Command line called in the test's process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from dora_pipe.cli import main, progress

Call = Callable[..., tuple[int, str, str]]


def caller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return the call of a command: (exit code, stdout, stderr), without progress on a slow
    machine."""
    monkeypatch.setattr(progress, "QUIET_S", threading.TIMEOUT_MAX)

    def called(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dora-pipe", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        printed = capsys.readouterr()
        code = ended.value.code
        return (0 if code is None else int(code)), printed.out, printed.err

    return called

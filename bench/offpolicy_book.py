"""The study's file: a line for every cell that is done, so that a study goes on where it ended.

It decides that cells of another setting are never mixed with these, and that a line which was cut
off by a crash was never written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.bench.offpolicy import OBJECTIVES, Cell, Measured
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.schemas.wire import canonical, sha256_hex

CELLS: Final = "cells.jsonl"
SETTING: Final = "setting.json"
SETTING_DIGITS: Final = 16
BOOK_BYTES_MAX: Final = 64 * 1024 * 1024
"""A larger file is none of ours."""

_HINT: Final = "give the options that it was made with, or another --out"
_LINE: Final = msgspec.json.Decoder(Measured)


def setting_digest(setting: Mapping[str, Any]) -> str:
    """A short name of plain values that must be equal where cells are compared."""
    return sha256_hex(canonical(setting))[:SETTING_DIGITS]


class Book:
    """The cells of one setting that are done.

    Example: ``book = Book(Path("study"), setting)``, then ``book.add(measured)`` for every cell
    that is not in ``book.cells``.
    """

    def __init__(self, folder: Path, setting: Mapping[str, Any]) -> None:
        """`folder` is there; it belongs to this setting from now on, warm starts and all.

        Raises UsageError for a folder of another setting, or a file that is none of ours.
        """
        self._path = folder / CELLS
        self.setting = setting_digest(setting)
        self.cells: dict[Cell, Measured] = {}
        self._settle(folder / SETTING, setting)
        if self._path.exists():
            self._read()

    def add(self, measured: Measured) -> None:
        """Append a cell, durably. Raises ResourceError."""
        assert measured.setting == self.setting
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(measured) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ResourceError(f"{self._path} cannot be written: {error.strerror}") from error
        self.cells[measured.cell] = measured

    def _settle(self, path: Path, setting: Mapping[str, Any]) -> None:
        """Write the setting down, or compare it with what was."""
        try:
            if not path.exists():
                path.write_bytes(canonical(setting) + b"\n")
            found = path.read_bytes().strip()
        except OSError as error:
            raise ResourceError(f"{path}: {error.strerror}") from error
        if found != canonical(setting):
            raise UsageError(f"{path.parent} is a study of another setting", hint=_HINT)

    def _read(self) -> None:
        if self._path.stat().st_size > BOOK_BYTES_MAX:
            raise UsageError(f"{self._path} is larger than {BOOK_BYTES_MAX} bytes")
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            self._take(line, number)

    def _take(self, line: bytes, number: int) -> None:
        try:
            measured = _LINE.decode(line)
        except msgspec.DecodeError as error:
            raise UsageError(f"{self._path} line {number}: {error}") from None
        if measured.setting != self.setting:
            raise UsageError(
                f"{self._path} line {number} is of another setting",
                hint=_HINT,
            )
        if measured.objective not in OBJECTIVES or not measured.rewards:
            raise UsageError(f"{self._path} line {number} is no cell of this study")
        self.cells[measured.cell] = measured

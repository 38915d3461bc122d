"""Result file of a study."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.schemas.wire import canonical, sha256_hex

CELLS: Final = "cells.jsonl"
SETTING: Final = "setting.json"
SETTING_DIGITS: Final = 16
FILE_BYTES_MAX: Final = 64 * 1024 * 1024

_HINT: Final = "use its original options, or another --out"

CellT = TypeVar("CellT", bound=Hashable, covariant=True)


class Measured(Protocol[CellT]):
    @property
    def setting(self) -> str:
        """Digest of everything that must be equal in compared cells."""
        ...

    @property
    def cell(self) -> CellT:
        """Return the cell. Raises ValueError if the study has no such cell."""
        ...


CellKey = TypeVar("CellKey", bound=Hashable)
Figures = TypeVar("Figures", bound=Measured[Any])


class CellFile(Generic[CellKey, Figures]):
    """Finished cells of one setting, one line each, so that a study can be resumed.

    Other settings are rejected; a truncated last line is ignored.

    Example: ``done = CellFile(Path("study"), setting, kind=Measured)``, then ``done.add(measured)``
    for every cell missing in ``done.cells``.
    """

    def __init__(self, folder: Path, setting: Mapping[str, Any], *, kind: type[Figures]) -> None:
        """Raises UsageError for another setting or an invalid file."""
        self._path = folder / CELLS
        self._kind = kind
        self.setting = setting_digest(setting)
        self.cells: dict[CellKey, Figures] = {}
        self._check_setting(folder / SETTING, setting)
        if self._path.exists():
            self._read()

    def add(self, measured: Figures) -> None:
        """Append durably. Raises ResourceError."""
        assert measured.setting == self.setting
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(measured) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ResourceError(f"{self._path} cannot be written: {error.strerror}") from error
        self.cells[measured.cell] = measured

    def _check_setting(self, path: Path, setting: Mapping[str, Any]) -> None:
        try:
            if not path.exists():
                path.write_bytes(canonical(setting) + b"\n")
            stored = path.read_bytes().strip()
        except OSError as error:
            raise ResourceError(f"{path}: {error.strerror}") from error
        if stored != canonical(setting):
            raise UsageError(f"{path.parent} is a study with other settings", hint=_HINT)

    def _read(self) -> None:
        if self._path.stat().st_size > FILE_BYTES_MAX:
            raise UsageError(f"{self._path} is larger than {FILE_BYTES_MAX} bytes")
        data = self._path.read_bytes()
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):
            os.truncate(self._path, len(complete))
        for number, line in enumerate(complete.splitlines(), 1):
            self._add_line(line, number)

    def _add_line(self, line: bytes, number: int) -> None:
        where = f"{self._path} line {number}"
        try:
            measured = msgspec.json.decode(line, type=self._kind)
        except msgspec.DecodeError as error:
            raise UsageError(f"{where}: {error}") from None
        if measured.setting != self.setting:
            raise UsageError(f"{where} is of another setting", hint=_HINT)
        try:
            self.cells[measured.cell] = measured
        except ValueError:
            raise UsageError(f"{where} is not a cell of this study") from None


def setting_digest(setting: Mapping[str, Any]) -> str:
    """Return a digest independent of key order."""
    return sha256_hex(canonical(setting))[:SETTING_DIGITS]

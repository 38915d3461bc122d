"""How a bug is planted into this process, and taken out again; decides nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_MISSING: Final = object()
_HERE: Final = "dora_pipe.sim.mutants"


class Patches:
    """Changes of rules of this process; `undo` takes them back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give a class or a module another attribute."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def everywhere(self, original: Any, value: Any) -> None:
        """Put `value` wherever another module of this package has `original`, under any name."""
        found = [
            (module, name)
            for key, module in list(sys.modules.items())
            if key.startswith("dora_pipe.") and not key.startswith(_HERE)
            for name, there in vars(module).items()
            if there is original
        ]
        assert found, f"nobody has {original}"
        for module, name in found:
            self.put(module, name, value)

    def undo(self) -> None:
        """Put everything back."""
        for owner, name, value in reversed(self._undo):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug: what is wrong, and how it is put there."""

    name: str
    what: str
    plant: Callable[[Patches], None]

"""Changes rules of this process while a planted bug is looked for, and puts them back."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Final

_MISSING: Final = object()


class Patches:
    """Changes that last as long as the block: ``with Patches() as patches: patches.put(...)``."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Patches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for owner, name, value in reversed(self._undo):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give a class or a module another attribute."""
        self._undo.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def everywhere(self, original: Any, value: Any) -> None:
        """Put `value` wherever a module of this package has `original`, under whichever name."""
        found = 0
        for module in _modules():
            for name, there in list(vars(module).items()):
                if there is original:
                    self.put(module, name, value)
                    found += 1
        assert found, f"nobody has {original}"


def _modules() -> list[Any]:
    """Those of this package, without the one that plants."""
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith("dora_pipe.") and name != "dora_pipe.sim.mutants"
    ]

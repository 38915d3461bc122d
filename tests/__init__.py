"""Everything that dora-pipe promises, as programs that can fail."""

from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_found = find_spec("dora_pipe")

if _found is None or Path(_found.origin or "").resolve() != _ROOT / "__init__.py":
    # Not installed, or from another tree, or as this tree was when it had a folder dora_pipe/.
    raise ImportError("dora_pipe is not installed from this tree: run `make setup`")

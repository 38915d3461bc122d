"""House rules as functions from a file to complaints, applied by tests/unit/test_tidy.py."""

import ast
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_INSTALLED = {"bench", "infra", "tests"}
FOLDERS = tuple(
    sorted({init.parent.name for init in ROOT.glob("*/__init__.py")} - {"infra", "tests"})
)
"""Top folders of code: `dora_pipe.<folder>` in a checkout."""

INSTALLED = tuple(folder for folder in FOLDERS if folder not in NOT_INSTALLED)
"""Folders in the wheel."""

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 600
MAX_FILE_BYTES = 2_000_000

_SKIPPED = {"build", "dist", "runs", "__pycache__", "node_modules"}
_NOT_INSTALLED = re.compile(rf"dora_pipe\.({'|'.join(sorted(NOT_INSTALLED))})(\.|$)")
"""Modules that a checkout can import but no wheel contains."""
_PICKLING = {"Queue", "SimpleQueue", "JoinableQueue", "Manager", "Pool", "ProcessPoolExecutor"}
_PICKLING_CALLS = _PICKLING | {"save", "load", "send", "recv"}
_HEAVY = {"torch", "transformers", "vllm", "deepspeed"}
HEAVY_HOMES = re.compile(
    r"producers/engines/torch/(?!causal_lm)\w+\.py$"
    r"|producers/engines/vllm/(extension|kv|plugins|sampler|weights)\.py$"
    r"|(consumers/learners|cli)/(\w+/)*\w*(torch|deepspeed|sft)\w*(/|\.py$)"
)
"""Files that may import torch and similar packages at import time."""
_CATCH_ALL_HOMES = re.compile(
    r"((cli|launch)/|analysis/probes\.py$|core/loop/(runtime|effect_runner)\.py$"
    r"|producers/tasks/(server|process|execution)\.py$)"
)
"""The task server and its threads run users' code, which may raise anything; the others end in a
message."""

# Built from parts, so that this file passes its own rules.
_UNFINISHED = re.compile(
    r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK")) + r")\b"
)
_MACHINE = re.compile(r"(^|[^\w.])/(" + "|".join(("work", "farm", "root", "home")) + r")/")
_NAMED_EXTRA = re.compile(r"dora-pipe\[")
_REGISTRY = re.compile(
    "|".join(
        (
            r"pypi\." + "org",
            "pythonhosted" + r"\.org",
            r"repo1?\." + r"maven",
            "maven" + r"\.org",
            r"npmjs\." + "org",
            r"crates\." + "io",
            "index" + "-url",
            "find" + "-links",
            r"registry\s*=\s*." + "http",
            "<url>" + r"\s*http",
        )
    )
)


def files(*suffixes: str) -> list[Path]:
    """Return every file that a commit could contain, relative to the root, sorted."""
    paths: list[Path] = []
    for folder, names, leaves in os.walk(ROOT):
        here = Path(folder)
        names[:] = [n for n in names if not _ignored(n)]
        # In a linked worktree `.git` is a file.
        paths += [(here / leaf).relative_to(ROOT) for leaf in leaves if leaf != ".git"]
    return sorted(p for p in paths if not suffixes or p.suffix in suffixes)


def _ignored(name: str) -> bool:
    hidden = name.startswith(".") and name != ".ci"
    return hidden or name in _SKIPPED or name.endswith(".egg-info")


@lru_cache(maxsize=1)
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


@lru_cache(maxsize=1)
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the tree; cached for all rules."""
    return tuple(ast.walk(tree_of(text)))


def sizes(path: str, text: str) -> Iterator[str]:
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines ({MAX_FILE_LINES})"
    for node in _functions(text):
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        if count > MAX_FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {node.name} has {count} lines ({MAX_FUNCTION_LINES})"


def docstrings(path: str, text: str) -> Iterator[str]:
    if len((ast.get_docstring(tree_of(text)) or "").split()) < 3:
        yield f"{path}: no sentence at its head that says what it contains"


def catching(path: str, text: str) -> Iterator[str]:
    """Allow catching all exceptions only in runtime, command line and task server."""
    if _CATCH_ALL_HOMES.match(path):
        return
    for node in nodes_of(text):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(k is None or ast.unparse(k) in ("Exception", "BaseException") for k in kinds):
            yield f"{path}:{node.lineno}: catches everything"


def imports(path: str, text: str) -> Iterator[str]:
    """Forbid modules outside the wheel; restrict torch imports."""
    tree = tree_of(text)
    for node, names in module_imports(tree):
        benches = path.startswith(("bench/", "tests/"))
        absent = {n for n in names if _NOT_INSTALLED.match(n)}
        if absent := {n for n in absent if not (benches and n.startswith("dora_pipe.bench"))}:
            yield f"{path}:{node.lineno}: {min(absent)} is in no wheel"
    if path.startswith("tests/"):
        return
    for node, names in module_imports(tree, only_at_import=True):
        heavy = {n for n in names if n.split(".")[0] in _HEAVY or n.startswith("safetensors.torch")}
        if heavy and (path.endswith("__init__.py") or not HEAVY_HOMES.match(path)):
            yield f"{path}:{node.lineno}: imports {min(heavy)} when it is imported itself"


def pickling(path: str, text: str) -> Iterator[str]:
    """Forbid implicit pickling: process queues and pools, torch's and numpy's files."""
    roots = {name.split(".")[0] for _, names in module_imports(tree_of(text)) for name in names}
    for node in nodes_of(text):
        if not isinstance(node, ast.Call) or not _may_pickle(node):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        if "multiprocessing" in roots and name in _PICKLING and owner != "queue":
            yield f"{path}:{node.lineno}: {called} pickles what it carries"
        if "multiprocessing" in roots and name in ("send", "recv") and "sock" not in owner:
            yield f"{path}:{node.lineno}: {called} pickles; send_bytes and recv_bytes do not"
        if name == "ProcessPoolExecutor" or called in ("torch.save", "torch.load"):
            yield f"{path}:{node.lineno}: {called} pickles"
        if any(k.arg == "allow_pickle" and ast.unparse(k.value) == "True" for k in node.keywords):
            yield f"{path}:{node.lineno}: {called} is allowed to pickle"


def _may_pickle(node: ast.Call) -> bool:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name in _PICKLING_CALLS or any(
        keyword.arg == "allow_pickle" for keyword in node.keywords
    )


def assertions(path: str, text: str) -> Iterator[str]:
    for node in _functions(text):
        if node.name.startswith("test_") and not any(map(_asserts, ast.walk(node))):
            yield f"{path}:{node.lineno}: {node.name} asserts nothing"


def sleeping(path: str, text: str) -> Iterator[str]:
    if not path.startswith("tests/unit/"):
        return
    for node in nodes_of(text):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep"):
            yield f"{path}:{node.lineno}: sleeps"


def words(path: str, text: str) -> Iterator[str]:
    """Forbid unfinished work, machine paths, registry addresses and installs by an unregistered
    name."""
    for pattern, what in (
        (_UNFINISHED, "unfinished"),
        (_MACHINE, "a path of one machine"),
        (_REGISTRY, "an address of a registry"),
        (_NAMED_EXTRA, "an extra by a name that is on no index (core/errors.py)"),
    ):
        if pattern is _NAMED_EXTRA and path.startswith(("pyproject.toml", "requirements/")):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                yield f"{path}:{number}: {what}: {line.strip()[:80]}"


PYTHON_RULES: tuple[Callable[[str, str], Iterator[str]], ...] = (
    sizes,
    docstrings,
    catching,
    imports,
    pickling,
    assertions,
    sleeping,
)


def _functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes_of(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in ("raises", "warns", "fail"):
        return True
    if isinstance(node, ast.Call):
        return re.search("assert|check|expect|verify", ast.unparse(node.func)) is not None
    return isinstance(node, ast.Assert)


def module_imports(
    tree: ast.AST, *, only_at_import: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, list[str]]]:
    """Yield import statements with full names; `only_at_import` excludes those in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield node, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if not node.level:
                yield node, [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif not (only_at_import and _runs_later(node)):
            yield from module_imports(node, only_at_import=only_at_import)


def _runs_later(node: ast.AST) -> bool:
    guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    return guarded or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)

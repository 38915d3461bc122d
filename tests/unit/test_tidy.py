"""Tests of the house rules and of the tree against them."""

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.support import tidy

Rule = Callable[[str, str], Iterator[str]]

HEAD = '"""Says what this decides."""\n'
LONG = "def long() -> None:\n" + "    pass\n" * 60
FUNCTION = "def f() -> None:\n    "

BROKEN: list[tuple[Rule, str, str, str]] = [
    (tidy.sizes, "schemas/a.py", LONG, "long has 61 lines"),
    (tidy.sizes, "schemas/a.py", "x = 1\n" * 601, "601 lines"),
    (tidy.docstrings, "schemas/a.py", "x = 1\n", "no sentence"),
    (tidy.docstrings, "schemas/__init__.py", "", "no sentence"),
    (tidy.catching, "schemas/a.py", "try: ...\nexcept Exception: ...\n", "catches everything"),
    (tidy.catching, "schemas/a.py", "try: ...\nexcept: ...\n", "catches everything"),
    (tidy.catching, "tests/a.py", "try: ...\nexcept (OSError, BaseException): ...\n", "catches"),
    (tidy.imports, "cli/a.py", "from dora_pipe.tests.support import tidy\n", "is in no wheel"),
    (tidy.imports, "cli/a.py", "from dora_pipe import infra\n", "dora_pipe.infra is in no wheel"),
    (tidy.imports, "orchestrator/a.py", "import torch\n", "imports torch"),
    (tidy.imports, "core/a.py", "from safetensors import torch\n", "safetensors.torch"),
    (tidy.imports, "producers/engines/torch/__init__.py", "import torch\n", "imports torch"),
    (tidy.pickling, "a.py", "import multiprocessing as m\nq = m.Queue()\n", "m.Queue pickles"),
    (tidy.pickling, "a.py", "import multiprocessing\npipe.send(1)\n", "pipe.send pickles"),
    (tidy.pickling, "a.py", "torch.save(x, f)\n", "torch.save pickles"),
    (tidy.pickling, "a.py", "numpy.load(f, allow_pickle=True)\n", "allowed to pickle"),
    (tidy.assertions, "tests/a.py", "def test_a() -> None:\n    f()\n", "asserts nothing"),
    (tidy.sleeping, "tests/unit/a.py", "time.sleep(1)\n", "sleeps"),
    (tidy.words, "README.md", "# TO" + "DO later\n", "unfinished"),
    (tidy.words, "README.md", "see /ro" + "ot/notes\n", "a path of one machine"),
    (tidy.words, "r.txt", "--index" + "-url x\n", "an address of a registry"),
    (tidy.words, "r.txt", "from pypi" + ".org\n", "an address of a registry"),
    (tidy.words, "docs/a.md", "pip install dora-pipe" + "[chat]\n", "on no index"),
]

SOUND: list[tuple[Rule, str, str]] = [
    (tidy.sizes, "schemas/a.py", LONG.removesuffix("    pass\n")),
    (tidy.docstrings, "schemas/a.py", HEAD),
    (tidy.catching, "cli/a.py", "try: ...\nexcept Exception: ...\n"),
    (tidy.imports, "cli/a.py", "from infra.kafka.broker import Broker\n"),
    (tidy.catching, "core/loop/runtime.py", "try: ...\nexcept Exception: ...\n"),
    (tidy.catching, "schemas/a.py", "try: ...\nexcept OSError: ...\n"),
    (tidy.imports, "cli/a.py", "from dora_pipe.schemas import control\n"),
    (tidy.imports, "producers/engines/torch/engine.py", "import torch\n"),
    (tidy.imports, "consumers/learners/torch/step.py", "from transformers import AutoConfig\n"),
    (tidy.imports, "store/a.py", FUNCTION + "import torch\n"),
    (tidy.imports, "core/a.py", "if TYPE_CHECKING:\n    import torch\n"),
    (tidy.pickling, "a.py", "import multiprocessing\nimport queue\nqueue.Queue()\n"),
    (tidy.pickling, "a.py", "import multiprocessing\npipe.send_bytes(b'')\n"),
    (tidy.assertions, "tests/a.py", "def test_a() -> None:\n    assert f()\n"),
    (
        tidy.assertions,
        "tests/a.py",
        "def test_a() -> None:\n    with raises(E): f()\n    check()\n",
    ),
    (tidy.sleeping, "tests/slow/a.py", "time.sleep(1)\n"),
    (tidy.words, "README.md", "the work/root of a run\n"),
    (tidy.words, "pyproject.toml", "dora-pipe" + "[torch]\n"),
]


@pytest.mark.parametrize(("rule", "path", "text", "expected"), BROKEN)
def test_rule_refuses_and_says_why(rule: Rule, path: str, text: str, expected: str) -> None:
    complaints = list(rule(path, text))
    assert len(complaints) == 1, complaints
    assert expected in complaints[0]
    assert complaints[0].startswith(path)


@pytest.mark.parametrize(("rule", "path", "text"), SOUND)
def test_rule_lets_sound_code_pass(rule: Rule, path: str, text: str) -> None:
    assert list(rule(path, text)) == []


@pytest.fixture(scope="module")
def broken() -> dict[str, list[str]]:
    results: dict[str, list[str]] = {rule.__name__: [] for rule in tidy.PYTHON_RULES}
    files = tidy.files(".py")
    assert len(files) > 20, "the walk over the tree found too little to mean anything"
    for path in files:
        text = (tidy.ROOT / path).read_text()
        for rule in tidy.PYTHON_RULES:
            results[rule.__name__] += rule(str(path), text)
    return results


@pytest.mark.parametrize("rule", [rule.__name__ for rule in tidy.PYTHON_RULES])
def test_no_python_file_breaks_the_rule(rule: str, broken: dict[str, list[str]]) -> None:
    assert not broken[rule], "\n".join(broken[rule])


def test_no_file_holds_a_word_that_has_no_place_here() -> None:
    complaints: list[str] = []
    for path in tidy.files():
        try:
            text = (tidy.ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # golden bytes
        complaints += tidy.words(str(path), text)
    assert not complaints, "\n".join(complaints)


def test_no_file_is_too_big_for_a_repository() -> None:
    sizes = {str(p): (tidy.ROOT / p).stat().st_size for p in tidy.files()}
    assert "pyproject.toml" in sizes
    assert {p: s for p, s in sizes.items() if s > tidy.MAX_FILE_BYTES} == {}


def test_every_test_file_is_named_so_that_pytest_finds_it() -> None:
    lost: list[str] = []
    for path in tidy.files(".py"):
        if path.parts[0] != "tests" or path.name.startswith("test_"):
            continue
        tree = ast.parse((tidy.ROOT / path).read_text())
        names = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        lost += [f"{path}: {name}" for name in names if name.startswith("test_")]
    assert not lost, "\n".join(lost)

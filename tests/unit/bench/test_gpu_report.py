"""Tests of GPU reports: bounded pieces, each run once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench import gpu_report
from dora_pipe.bench.gpu_report import (
    NO_GPU,
    PIECES,
    Machine,
    Piece,
    PieceOutcome,
    main,
    run_report,
)
from tests.support.device import has_gpu
from tests.support.gpu import ROUNDS

COUNTS = """
with open("ran", "a") as file:
    file.write("x")
print('{"n": 1}')
print("3 passed in 1s")
"""


def _piece(name: str, code: str, needs: str = "") -> Piece:
    return Piece(name=name, what=f"what {name} is", command=("-c", code), needs=needs)


def _run(
    folder: Path, *pieces: Piece, commit: str = "abc", seconds: float = 30
) -> list[PieceOutcome]:
    machine = Machine(card="a card", driver="1", versions={"torch": "2"}, commit=commit)
    return list(run_report(folder, pieces, machine, seconds=seconds))


def test_every_round_of_tests_is_a_piece() -> None:
    rounds = {piece.name for piece in PIECES if piece.name.startswith("suite-")}
    assert rounds == {f"suite-{gpu_round.name}" for gpu_round in ROUNDS}
    needs = {f"suite-{piece.name}": piece.needs for piece in ROUNDS}
    assert all(piece.needs == needs[piece.name] for piece in PIECES if piece.name in needs)


def test_every_piece_has_its_way_on_a_cpu_or_says_that_it_wants_a_gpu(tmp_path: Path) -> None:
    without = {piece.name for piece in PIECES if not piece.tiny}
    assert without == {f"suite-{gpu_round.name}" for gpu_round in ROUNDS}
    (outcome,) = _run(tmp_path, Piece(name="suite", what="a suite", command=()))
    assert (outcome.state, outcome.said) == ("skipped", NO_GPU)


def test_a_piece_that_is_done_is_not_run_again_at_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    piece = _piece("one", COUNTS)
    first, again = (_run(tmp_path / "out", piece)[0] for _ in range(2))
    assert first == again
    assert (first.state, first.figures, first.said) == ("done", [{"n": 1}], "3 passed")
    assert Path("ran").read_text() == "x"
    _run(tmp_path / "out", piece, commit="def")
    assert Path("ran").read_text() == "xx"


def test_what_fails_or_is_not_installed_says_so_and_the_others_run(tmp_path: Path) -> None:
    pieces = (
        _piece("bad", "raise SystemExit(3)"),
        _piece("absent", "raise SystemExit(3)", needs="no_such_package"),
        _piece("few", "print('gpu round few  0 s  skipped: it needs 2 GPUs, here is 1')"),
        _piece("good", "pass"),
    )
    results = {outcome.piece: (outcome.state, outcome.said) for outcome in _run(tmp_path, *pieces)}
    assert results == {
        "bad": ("failed", "exit code 3"),
        "absent": ("skipped", "no_such_package is not installed"),
        "few": ("skipped", "it needs 2 GPUs, here is 1"),
        "good": ("done", ""),
    }


def test_without_a_gpu_it_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_gpu():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(gpu_report, "run_report", lambda *given, **more: pytest.fail("it ran"))
    assert main([]) == 1
    assert capsys.readouterr().err == f"error: {NO_GPU}\n"

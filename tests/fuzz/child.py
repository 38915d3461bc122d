"""Fuzzes one target in a process of its own: ``python -m tests.fuzz.child TARGET <libFuzzer's>``.

Atheris sees the branches of our Python. Most of a decoder is C (msgspec, pyarrow, zstd), of which
it sees nothing; so every other wording of a refusal counts as a branch too: an input that gets to a
check that none has got to is kept.
"""

from __future__ import annotations

import resource
import sys
from random import Random
from typing import Final

import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

MODULES: Final = (
    "dora_pipe.config",
    "dora_pipe.store",
    "dora_pipe.schemas",
    "msgspec",
    "tomllib",
)
ADDRESS_BYTES_MAX: Final = 4 * 1024**3
"""Above what the process maps without using it; a single huge allocation fails."""

WORDINGS_MAX: Final = 4096


def main() -> None:
    sys.setrecursionlimit(1000)
    name = sys.argv.pop(1)
    with atheris.instrument_imports(include=list(MODULES)):
        from tests.fuzz import targets
    from tests.fuzz import mutations
    from tests.fuzz.wordings import wording

    target = targets.TARGETS[name]
    counters = [atheris._reserve_counter() for _ in range(WORDINGS_MAX)]
    wordings: dict[str, int] = {}

    def one(data: bytes) -> None:
        refused = targets.check(target, data)
        text = "" if refused is None else wording(refused.message)
        number = wordings.setdefault(text, len(wordings) % WORDINGS_MAX)
        atheris._trace_branch(counters[number])

    def mutate(data: bytes, size_max: int, seed: int) -> bytes:
        return mutations.mutate(target.shape, data, size_max, Random(seed), atheris.Mutate)

    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES_MAX, ADDRESS_BYTES_MAX))
    atheris.Setup(sys.argv, one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

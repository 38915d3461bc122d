"""What `dora-pipe replay --json` said of a run, to be shown beside it; it decides nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import UsageError
from dora_pipe.observe.web.figures import short

LINES_MAX: Final = 1_000_000


class ReplayLine(msgspec.Struct, frozen=True, kw_only=True):
    """One replayed step, as far as it is shown."""

    step: int
    wanted: bool
    equal: bool
    digest_committed: str
    digest_replayed: str
    tensor: str | None
    compute_s_committed: float
    compute_s_replayed: float
    other_numerics: Any = None


def read_replay(path: Path) -> list[ReplayLine]:
    """The lines of a file that `replay RUN --json` wrote. Raises UsageError."""
    hint = "write it with: dora-pipe replay RUN --json > FILE"
    decode = msgspec.json.Decoder(ReplayLine).decode
    found: list[ReplayLine] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number > LINES_MAX:
                    raise UsageError(f"{path} has more than {LINES_MAX} lines")
                if line.strip():
                    found.append(decode(line))
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} is no replay: {error}", hint=hint) from None
    return found


def replay_page(lines: list[ReplayLine]) -> dict[str, Any]:
    """Every replayed step: bits and times, then and now."""
    rows = [
        [
            one.step,
            one.equal,
            one.digest_committed[:16],
            one.digest_replayed[:16],
            one.tensor or None,
            short(one.compute_s_committed),
            short(one.compute_s_replayed),
        ]
        for one in lines
        if one.wanted
    ]
    columns = ["step", "bit-equal", "committed", "replayed", "differs first in", "then s", "now s"]
    return {"equal": sum(row[1] for row in rows), "columns": columns, "rows": rows}

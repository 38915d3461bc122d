"""What `export --parquet` writes texts with: the run's tokenizer, and its data where it still is.

What cannot be had is null in the file, and one line says so.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from dora_pipe.audit.export_texts import Rows, Texts, Words
from dora_pipe.core.console import say
from dora_pipe.core.errors import DoraError
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.tasks.registry import open_task, rows_digest

if TYPE_CHECKING:
    from dora_pipe.schemas.control import RunStarted


def texts_of(run: OpenRun) -> Texts:
    """Of a run; it never fails for what a run may be without."""
    started, _ = policy_after(run.bus, run.topics, 0)
    return Texts(_words(run, started), _data(run, started))


def _words(run: OpenRun, started: RunStarted) -> Words | None:
    if importlib.util.find_spec("tokenizers") is None:
        _without("texts", "`tokenizers` is not installed (dora-pipe[torch])")
        return None
    from dora_pipe.producers.worker.tokenizer import Tokenizer

    try:
        return Tokenizer(run.policies.assets(started.assets_digest))
    except (DoraError, OSError, ImportError) as error:  # Old forms are read by transformers.
        _without("texts", str(error))
        return None


def _data(run: OpenRun, started: RunStarted) -> dict[str, Rows]:
    """Rows by the digest that trajectories name; those that are others now are left out."""
    task = run.config.task
    wanted = {started.dataset_digest, started.eval_digest} - {""}
    found: dict[str, Rows] = {}
    sys.path.insert(0, task.directory)
    try:
        opened = open_task(task)
        for split in ("train", "eval"):
            rows = opened.rows(split)
            digest, _ = rows_digest(rows, split)
            if digest in wanted:
                found[digest] = rows
    except Exception as error:  # A task is anybody's code.
        _without("columns of the data", f"{type(error).__name__}: {error}")
        return {}
    finally:
        sys.path.remove(task.directory)
    if found.keys() != wanted:
        _without("columns of the data", "it is not the data that the run had")
    return found


def _without(what: str, why: str) -> None:
    say(f"note: {what} are empty: {why}")

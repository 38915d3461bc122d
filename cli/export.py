"""`export`: a run's trajectories or a policy of it, in a file for other tools."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from dora_pipe.audit.export import export_parquet, export_policy
from dora_pipe.cli.damage import raise_if_damaged
from dora_pipe.cli.export_texts import texts_of
from dora_pipe.cli.options import may_write_file, may_write_folder
from dora_pipe.cli.replay_lines import rebuilder
from dora_pipe.core.console import say
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.run_dir import OpenRun


def export_parquet_file(run: OpenRun, parquet: Path, *, everything: bool, force: bool) -> None:
    """Write the trajectories of a run. Raises InvariantBroken where some are damaged."""
    may_write_file(parquet, force=force)
    store = run.policies if run.has_policies else None
    texts = texts_of(run)
    with closing(run.tables()) as tables:
        done = export_parquet(
            run.bus, run.topics, tables, store, parquet, everything=everything, texts=texts
        )
    left = f", {done.left_out} records left out" if done.left_out else ""
    say(f"{parquet}: {done.rows} trajectories, {done.bytes / 1e6:.1f} MB{left}")
    raise_if_damaged(done.damage, f", and not in {parquet}")


def export_policy_dir(run: OpenRun, policy: int, directory: Path | None, *, force: bool) -> None:
    """Write version `policy` as a model directory."""
    if directory is None:
        raise UsageError("--policy needs a directory: export RUN --policy N DIR")
    may_write_folder(directory, force=force)
    rebuilder(run).weights(policy)
    with closing(run.tables()) as tables:
        digest = export_policy(tables, run.policies, policy, directory)
    say(f"{directory}: version {policy}, weights {digest}")

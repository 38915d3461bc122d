"""The `dora-pipe` command: one app, one place where errors become a line and an exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import cast

import typer

from dora_pipe.cli import bench_audit, look, settings, start, think, trust
from dora_pipe.cli.archive import archive
from dora_pipe.cli.audit import audit
from dora_pipe.cli.bench_moves import moves
from dora_pipe.cli.bench_offpolicy import offpolicy
from dora_pipe.cli.bench_traces import traces
from dora_pipe.cli.demo import demo
from dora_pipe.cli.doctor import doctor
from dora_pipe.cli.faults import faults
from dora_pipe.cli.init import init, sft
from dora_pipe.cli.metrics import metrics
from dora_pipe.cli.mismatch import mismatch
from dora_pipe.cli.output import complain, say
from dora_pipe.cli.paper import paper
from dora_pipe.cli.paradigms import paradigms
from dora_pipe.cli.prune import prune
from dora_pipe.cli.show import show
from dora_pipe.cli.sim import sim
from dora_pipe.cli.tell import tell
from dora_pipe.cli.top import top
from dora_pipe.cli.ui import ui
from dora_pipe.cli.up import down, up
from dora_pipe.cli.whatif import whatif
from dora_pipe.cli.why import why
from dora_pipe.errors import DoraError

EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="dora-pipe",
    help="Asynchronous RL post-training over a log: run it, look at it, prove it, replay it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="The configuration.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
sim_app = typer.Typer(invoke_without_command=True)

_COMMANDS: dict[str, Sequence[Callable[..., None]]] = {
    "Start": (
        demo,
        init,
        sft,
        start.run,
        start.orchestrator,
        start.worker,
        start.trainer,
        start.create_topics,
        up,
        down,
        tell,
        doctor,
    ),
    "Look": (look.runs, look.topics, look.cat, show, why, top, ui, metrics),
    "Trust": (audit, trust.replay, trust.export, archive, prune),
    "Think": (whatif, mismatch),
}
for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
_BENCHES = (
    think.engine,
    think.bus,
    think.archive,
    bench_audit.audit,
    think.codec,
    think.dataplane,
    moves,
    think.plan,
    think.restart,
    paradigms,
    offpolicy,
    traces,
    faults,
)
for _bench in _BENCHES:
    bench_app.command()(cast("Callable[..., None]", _bench))
sim_app.callback()(sim)
sim_app.command()(paper)
config_app.command("show")(settings.show)
app.add_typer(config_app, name="config", rich_help_panel="Start")
app.add_typer(sim_app, name="sim", rich_help_panel="Think")
app.add_typer(bench_app, name="bench", rich_help_panel="Think")


def main() -> None:
    """Run the command; the process ends with one of the named exit codes."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    try:
        app()
    except DoraError as error:
        complain(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)

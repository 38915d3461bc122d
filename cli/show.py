"""`show`: what a run is; or a step, a group or a trajectory of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_pipe.cli.output import emit_json
from dora_pipe.core.errors import InvariantBroken

if TYPE_CHECKING:
    from dora_pipe.launch.run_dir import OpenRun


def tell_of_run(run: OpenRun, *, as_json: bool) -> None:
    """Print how a run goes or went."""
    from dora_pipe.cli.show_run import overview, print_overview

    found = overview(run)
    if as_json:
        emit_json(found.plain())
    else:
        print_overview(found)


def tell_of_id(run: OpenRun, wanted: str, *, everything: bool, as_json: bool) -> None:
    """Print where a step, group or trajectory came from and went."""
    from dora_pipe.audit.describe import DAMAGE, tell
    from dora_pipe.cli.audit import remembered_ledger
    from dora_pipe.cli.show_step import is_step, print_step
    from dora_pipe.cli.show_story import print_story, text_decoder

    with remembered_ledger(run) as known:
        story = tell(run.bus, run.topics, run.policies, wanted, decoder=text_decoder, known=known)
    if as_json:
        emit_json(story)
    elif is_step(story) and not everything:
        print_step(story, run.topics.run)
    else:
        print_story(story)
    for one in story.get(DAMAGE, ()):
        raise InvariantBroken(one["what"], hint="`dora-pipe audit` looks at the whole log")

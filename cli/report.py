"""What a run cost and which versions its workers hosted, as tables."""

from __future__ import annotations

from dora_pipe.cli.output import emit_table
from dora_pipe.cli.rundir import OpenRun
from dora_pipe.views.costs import role_costs


def report_costs(run: OpenRun) -> None:
    """CPU seconds of every role after its imports, and the share of bus and control in all."""
    costs = role_costs(run.bus, run.topics)
    rows = [
        (
            one.role,
            one.epoch,
            one.cost.total_s,
            one.cost.bus_s,
            one.cost.control_s,
            one.cost.codec_s,
            one.cost.rss_bytes / 1e6,
        )
        for one in costs
    ]
    columns = ("role", "role epoch", "CPU s", "bus s", "control s", "codec s", "RSS MB")
    emit_table(columns, rows, title="CPU time after imports")
    total_s = sum(one.cost.total_s for one in costs) or 1.0
    bus_s = sum(one.cost.bus_s + one.cost.control_s for one in costs)
    codec_s = sum(one.cost.codec_s for one in costs)
    emit_table(
        ("share of all roles' CPU time", ""),
        [
            ("bus and control, polling included", f"{bus_s / total_s:.1%}"),
            ("codec", f"{codec_s / total_s:.1%}"),
        ],
    )

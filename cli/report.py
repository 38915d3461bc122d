"""What a run cost and which versions its workers hosted, as tables."""

from __future__ import annotations

from dora_pipe.catalogue.statuses import role_costs
from dora_pipe.cli.output import emit_table
from dora_pipe.launch.run_dir import OpenRun


def report_costs(run: OpenRun) -> None:
    """CPU seconds of every role after its imports, and the share of bus and control in all."""
    costs = role_costs(run.bus, run.topics)
    rows = [
        (
            role,
            epoch,
            cost.total_s,
            cost.bus_s,
            cost.control_s,
            cost.codec_s,
            cost.rss_bytes / 1e6,
        )
        for role, epoch, cost in costs
    ]
    columns = ("role", "incarnation", "CPU s", "bus s", "control s", "codec s", "RSS MB")
    emit_table(columns, rows, title="CPU time after imports")
    total_s = sum(cost.total_s for _, _, cost in costs) or 1.0
    bus_s = sum(cost.bus_s + cost.control_s for _, _, cost in costs)
    codec_s = sum(cost.codec_s for _, _, cost in costs)
    emit_table(
        ("share of all roles' CPU time", ""),
        [
            ("bus and control, polling included", f"{bus_s / total_s:.1%}"),
            ("codec", f"{codec_s / total_s:.1%}"),
        ],
    )

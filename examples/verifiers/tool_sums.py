"""The same sums with a tool: a taskset of verifiers whose model calls a calculator."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from calculator_server import Calculator
from sums import Numbers, SumsConfig, answered, rows

__all__ = ["ToolSums"]


class ToolSum(vf.Task[Numbers]):
    """Score of a row."""

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return answered(trace, sum(self.data.numbers))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        """Number of turns of the model."""
        return float(trace.num_turns)


class ToolSumsConfig(SumsConfig):
    """Settings of plain sums and the server of the tool."""

    most: int = 5
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class ToolSums(vf.Taskset[ToolSum, ToolSumsConfig]):
    """Sums of up to `most` numbers; all tasks share one server of the tool."""

    def load(self) -> Iterator[ToolSum]:
        """The tasks, which follow from the seed."""
        for row in rows(self.config):
            yield ToolSum(row, self.config.task)

    @classmethod
    def toolsets(cls, config: ToolSumsConfig) -> list[vf.Toolset]:
        return [Calculator(config.tools)]

"""The tool of `tool_sums`: verifiers runs this file as a server of its own."""

from __future__ import annotations

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    """A server of one tool, without a name prefix."""

    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, a: int, b: int) -> str:
        """Add two numbers, modulo 100."""
        return str((a + b) % 100)


if __name__ == "__main__":
    Calculator.run()

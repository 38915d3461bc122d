"""Wrong rules patched into production code, which the simulator's checkers must detect."""

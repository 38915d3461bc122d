"""Wrong rules, planted into production's: what the simulator's checkers have to find."""

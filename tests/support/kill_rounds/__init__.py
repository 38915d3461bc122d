"""Kill rounds: short runs of real roles, each killed at one moment, then judged."""

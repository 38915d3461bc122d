"""Kill rounds: short runs of the real roles, each struck at one moment, and what is left then."""

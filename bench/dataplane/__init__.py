"""`bench dataplane`: trajectories from a worker's process into a trainer's batch."""

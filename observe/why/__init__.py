"""Pictures of a run for people; they read the log and decide nothing."""

"""What a run tells the outside of itself, made from its log; it decides nothing of the run."""

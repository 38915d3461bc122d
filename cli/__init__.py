"""Command line of dora-pipe."""

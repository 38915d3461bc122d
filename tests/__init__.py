"""Everything that dora-pipe promises, as programs that can fail."""

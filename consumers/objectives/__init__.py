"""What a batch is turned into: advantages and losses."""

"""Types and decisions of every role, without IO, clock or randomness."""

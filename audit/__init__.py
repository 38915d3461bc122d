"""What a finished or living log proves: audit, replay, why, export."""

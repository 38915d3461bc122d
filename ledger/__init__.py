"""The log as tables: decisions, outcomes, and the places of records."""

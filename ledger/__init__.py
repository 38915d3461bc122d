"""The log as tables: what was decided, what became of it, and where its records lie."""

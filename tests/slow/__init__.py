"""What takes longer than a developer waits: kill rounds, a real broker, whole runs."""

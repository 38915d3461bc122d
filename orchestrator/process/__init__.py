"""Process of the orchestrator: reading the log, files, and the loop around its machine."""

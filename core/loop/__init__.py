"""Loop of a role: the runtime, its effects, retries and background appends."""

"""Tasks out of environments that others wrote, each behind the name of its package."""

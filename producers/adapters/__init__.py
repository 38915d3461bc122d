"""Tasks from third-party environments, prefixed by the name of their package."""

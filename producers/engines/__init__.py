"""The inference engines, imported on demand."""

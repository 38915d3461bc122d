"""The vLLM engine: a server and its client."""

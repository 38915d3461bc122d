"""vLLM behind the engine port: in the worker's process (`engine`), or as a server (`server`)."""

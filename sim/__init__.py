"""The deterministic simulation: production machines under simulated time and faults."""

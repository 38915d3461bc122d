"""Every record that crosses the bus; importing them does nothing else."""

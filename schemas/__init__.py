"""All records of the bus."""

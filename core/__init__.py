"""What every floor builds on: errors, the clock, the loop that runs machines, retries, waits."""

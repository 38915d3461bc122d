"""`bench dataplane`: trajectories from a worker's hands into a trainer's batch, side by side.

It decides nothing about a run. `measure` starts the processes and names the phases, `child` is what
runs in each of them, `figures` turns what they counted into rows.
"""

"""The rollout worker: its machine, the requests it runs, and the ports that do its work."""

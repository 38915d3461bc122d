"""What dora-pipe runs on, and how it is run there: a broker, containers, a Kubernetes cluster."""

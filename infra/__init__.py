"""Infrastructure of dora-pipe: a Kafka broker, containers, Kubernetes."""

"""The log on a Kafka cluster, through kafka-python."""

"""The log on Kafka, through kafka-python."""

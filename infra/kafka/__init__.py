"""Real Kafka brokers from Maven's jars, one or three, as plain processes of this machine."""

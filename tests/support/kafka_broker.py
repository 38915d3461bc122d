"""The real brokers that tests stand on; what they are and how they are hurt is in infra/kafka.

Take the fixture `kafka_broker` (one broker per session) and use topics of your own. A test that
kills or stops brokers makes its own: `with KafkaBroker(tmp_path) as broker`, or `KafkaCluster`.
"""

from infra.kafka.broker import KafkaBroker, Listener, free_ports
from infra.kafka.cluster import KafkaCluster
from infra.kafka.jars import BrokerError, missing_tools, tool
from tests.support.tidy import ROOT

__all__ = [
    "ROOT",
    "BrokerError",
    "KafkaBroker",
    "KafkaCluster",
    "Listener",
    "free_ports",
    "missing_tools",
    "tool",
]

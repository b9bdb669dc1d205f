"""Messages between the orchestrator and the workers, and what carries them.

messages says what is said, endpoint how it is sent and received; zmq_endpoint and hub are the two
sides over ZeroMQ and shared memory, memory the same inside one process; streams keeps numbers,
credits and tombstones.  Imports no torch.
"""

from omnistage.transport.addresses import host_id
from omnistage.transport.endpoint import Endpoint, Hub
from omnistage.transport.hub import ZmqHub
from omnistage.transport.keys import ClusterKeys
from omnistage.transport.memory import MemoryEndpoint, MemoryHub, MemoryNetwork
from omnistage.transport.messages import ORCHESTRATOR
from omnistage.transport.shared_memory import remove_leftovers
from omnistage.transport.streams import Arrival, StreamReceiver, StreamSender, StreamTable
from omnistage.transport.zmq_endpoint import ZmqEndpoint

__all__ = [
    "ORCHESTRATOR",
    "Arrival",
    "ClusterKeys",
    "Endpoint",
    "Hub",
    "MemoryEndpoint",
    "MemoryHub",
    "MemoryNetwork",
    "StreamReceiver",
    "StreamSender",
    "StreamTable",
    "ZmqEndpoint",
    "ZmqHub",
    "host_id",
    "remove_leftovers",
]

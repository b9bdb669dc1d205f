"""What only the ZeroMQ implementation has: hosts, tcp, keys, malformed frames, killed processes."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from omnistage.errors import TransportError
from omnistage.transport import ORCHESTRATOR, ClusterKeys, ZmqEndpoint, ZmqHub, remove_leftovers
from omnistage.transport.addresses import Address, shared_directory
from omnistage.transport.exchange import SHARE_BYTES
from omnistage.transport.messages import Abort, Heartbeat, Hello, PeerGone, StepReport
from omnistage.types import HostTensor

SECONDS = 10.0
LARGE = SHARE_BYTES * 4
RUN = f"t{os.getpid()}"

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def opened(no_leaks):
    """Close what a test appends, the last first."""
    opened = []
    yield opened
    for each in reversed(opened):
        each.close()


@pytest.fixture
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    ClusterKeys.generate().save(path)
    return path


def take(endpoint):
    message = endpoint.receive(SECONDS)
    assert message is not None
    return message


async def hear(hub):
    return await asyncio.wait_for(hub.receive(), SECONDS)


def open_worker(opened, hub, bind, name="w", **options):
    worker = ZmqEndpoint(name=name, run_id=RUN, control=hub.address, bind=bind, **options)
    opened.append(worker)
    return worker


def open_hub(opened, directory, **options):
    hub = ZmqHub(run_id=RUN, run_dir=directory, **options)
    opened.append(hub)
    return hub


# --- hosts and tcp --------------------------------------------------------------------------------


async def test_workers_on_two_hosts_talk_by_encrypted_tcp(opened, tmp_path, key_file, make_chunk):
    """A local worker on ipc and 127.0.0.1, a remote one that knows 127.0.0.2 and nothing of this host."""
    hub = open_hub(opened, tmp_path, listen_tcp="tcp://127.0.0.1:0", key_file=key_file)
    local = open_worker(opened, hub, f"ipc://{tmp_path},tcp://127.0.0.1:0", "local", key_file=key_file)
    remote = open_worker(opened, hub, "tcp://127.0.0.2:0", "remote", key_file=key_file, host="elsewhere")
    assert "ipc" not in remote.address
    assert "127.0.0.2" in remote.address
    for worker in (local, remote):
        worker.send(ORCHESTRATOR, Heartbeat(worker="w"))
        assert (await hear(hub))[0] == worker.address
        hub.send(worker.address, Abort(keys=()))
        assert take(worker) == Abort(keys=())
    for producer, consumer in ((local, remote), (remote, local)):
        for sequence in range(10):
            producer.send(consumer.address, make_chunk(sequence, nbytes=LARGE))
        assert producer.stats()["slots_in_use"] == 0
        assert producer.stats()["tensors_in_frames"] == 10
        for sequence in range(10):
            received = take(consumer)
            assert received.sequence == sequence
            expected = make_chunk(sequence, nbytes=LARGE).payload.tensors["pcm"].numpy()
            np.testing.assert_array_equal(received.payload.tensors["pcm"].numpy(), expected)
            consumer.release(received)
        assert consumer.stats()["tensors_held"] == 0
    remote.send(ORCHESTRATOR, StepReport(worker="remote", chunks=(make_chunk(0, nbytes=LARGE),)))
    assert remote.stats()["slots_in_use"] == 0
    _, report = await hear(hub)
    assert report.chunks[0].payload.tensors["pcm"].nbytes == LARGE


async def test_a_pinned_tensor_is_copied_before_it_goes_as_a_frame(opened, tmp_path, make_chunk):
    hub = open_hub(opened, tmp_path, listen_tcp="tcp://127.0.0.1:0")
    local = open_worker(opened, hub, f"ipc://{tmp_path}", "local")
    remote = open_worker(opened, hub, "tcp://127.0.0.2:0", "remote", host="elsewhere")
    tensor = local.share(HostTensor.from_numpy(np.ones(1 << 20, np.uint8)))
    local.send(remote.address, make_chunk(0, tensor=tensor))
    local.unshare(tensor)
    local.share(HostTensor.from_numpy(np.zeros(1 << 20, np.uint8)))  # takes the freed slot
    received = take(remote).payload.tensors["pcm"].numpy()
    assert received.min() == 1


async def test_without_shared_memory_tensors_go_as_frames_both_ways(opened, tmp_path, make_chunk):
    hub = open_hub(opened, tmp_path)
    plain = open_worker(opened, hub, f"ipc://{tmp_path}", "plain", shared_memory=0)
    sharing = open_worker(opened, hub, f"ipc://{tmp_path}", "sharing")
    for producer, consumer in ((plain, sharing), (sharing, plain)):
        producer.send(consumer.address, make_chunk(0, nbytes=LARGE))
        assert producer.stats()["slots_in_use"] == 0
        assert take(consumer).payload.tensors["pcm"].nbytes == LARGE


async def test_an_ipc_worker_cannot_be_reached_from_another_host(opened, tmp_path, make_chunk):
    hub = open_hub(opened, tmp_path, listen_tcp="tcp://127.0.0.1:0")
    local = open_worker(opened, hub, f"ipc://{tmp_path}", "local")
    remote = open_worker(opened, hub, "tcp://127.0.0.2:0", "remote", host="elsewhere")
    with pytest.raises(TransportError, match="give it a tcp address"):
        remote.send(local.address, make_chunk(0))


def monitored(context, kind, url, keys, server_key, words):
    """A client socket and the socket that reports its handshakes."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.reconnect_ivl = -1
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys
        socket.curve_serverkey = server_key
    kinds = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_DISCONNECTED
    )
    monitor = socket.get_monitor_socket(kinds)
    monitor.linger = 0
    socket.connect(url)
    if words is not None:
        socket.send(words)
    return socket, monitor


def handshake_succeeds(kind, url, keys, server_key=None, words=b"let me in"):
    with zmq.Context() as context:
        socket, monitor = monitored(context, kind, url, keys, server_key, words)
        try:
            assert monitor.poll(int(SECONDS * 1000))
            return recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        finally:
            socket.disable_monitor()
            monitor.close()
            socket.close()


async def test_only_the_clusters_keys_open_its_ports(opened, tmp_path, key_file):
    keys = ClusterKeys.load(key_file)
    hub = open_hub(opened, tmp_path, listen_tcp="tcp://127.0.0.1:0", key_file=key_file)
    worker = open_worker(opened, hub, "tcp://127.0.0.2:0", key_file=key_file, host="elsewhere")
    stranger = zmq.curve_keypair()
    for kind, address in ((zmq.DEALER, hub.address), (zmq.PUSH, worker.address)):
        url = Address.parse(address).tcp
        assert handshake_succeeds(kind, url, (keys.public, keys.secret), keys.public, words=None)
        assert not handshake_succeeds(kind, url, stranger, keys.public)  # even knowing the public key
        assert not handshake_succeeds(kind, url, (keys.public, stranger[1]), keys.public)
        assert not handshake_succeeds(kind, url, stranger, stranger[0])
        assert not handshake_succeeds(kind, url, None)
    worker.send(ORCHESTRATOR, Heartbeat(worker="w"))
    assert await hear(hub) == (worker.address, Heartbeat(worker="w"))  # and no stranger's words


# --- errors ---------------------------------------------------------------------------------------


async def test_malformed_messages_are_errors_and_the_next_ones_arrive(opened, tmp_path):
    hub = open_hub(opened, tmp_path)
    worker, peer = (open_worker(opened, hub, f"ipc://{tmp_path}", name) for name in ("worker", "peer"))
    with zmq.Context() as context:
        intruder = context.socket(zmq.PUSH)
        intruder.connect(Address.parse(worker.address).ipc)
        intruder.send(b"noise")
        with pytest.raises(TransportError, match="malformed"):
            take(worker)
        intruder.close()
        router = context.socket(zmq.DEALER)
        router.routing_id = peer.address.replace("peer", "other").encode()
        router.connect(Address.parse(hub.address).ipc)
        router.send_multipart([b"noise", b"more"])
        with pytest.raises(TransportError, match="malformed"):
            await hear(hub)
        router.close()
    peer.send(worker.address, Abort(keys=()))
    assert take(worker) == Abort(keys=())
    peer.send(ORCHESTRATOR, Heartbeat(worker="p"))
    assert (await hear(hub))[0] == peer.address


@pytest.mark.parametrize(
    ("bind", "match"),
    [
        ("", "cannot listen"),
        ("/tmp/x", "cannot listen"),
        ("ipc:///nowhere/at/all", "run directory must exist"),
        ("ipc:///" + "x" * 120, "shorter run directory"),
        ("tcp://127.0.0.1:0,tcp://127.0.0.2:0", "cannot listen"),
        ("tcp://192.0.2.1:0", "keys"),
        ("tcp://0.0.0.0:0", "keys"),
    ],
)
def test_impossible_places_to_listen_are_refused_and_leave_nothing(opened, tmp_path, bind, match):
    hub = open_hub(opened, tmp_path)
    with pytest.raises(TransportError, match=match):
        ZmqEndpoint(name="w", run_id=RUN, control=hub.address, bind=bind)


def test_a_taken_port_and_a_wildcard_are_refused(opened, tmp_path, key_file):
    hub = open_hub(opened, tmp_path, listen_tcp="tcp://127.0.0.1:0")
    with pytest.raises(TransportError, match="choose a free port"):
        ZmqHub(run_id=RUN, run_dir=tmp_path, listen_tcp=Address.parse(hub.address).tcp)
    options = {"run_id": RUN, "run_dir": tmp_path, "listen_tcp": "tcp://0.0.0.0:0", "key_file": key_file}
    with pytest.raises(TransportError, match="every interface"):
        ZmqHub(**options)
    everywhere = ZmqHub(**options, advertise="server.example")
    opened.append(everywhere)
    assert Address.parse(everywhere.address).tcp.startswith("tcp://server.example:")


def test_unknown_destinations_are_refused(opened, tmp_path):
    hub = open_hub(opened, tmp_path)
    worker = open_worker(opened, hub, f"ipc://{tmp_path}")
    with pytest.raises(TransportError, match="not an endpoint's address"):
        worker.send("nobody", Abort(keys=()))


async def test_a_send_does_not_hide_an_arrival(opened, tmp_path):
    """Any call on a ZeroMQ socket may consume the signal that a message has arrived."""
    hub = open_hub(opened, tmp_path)
    worker = open_worker(opened, hub, f"ipc://{tmp_path}")
    worker.send(ORCHESTRATOR, Heartbeat(worker="w"))
    await hear(hub)
    receiving = asyncio.create_task(hub.receive())
    await asyncio.sleep(0)  # it waits now
    worker.send(ORCHESTRATOR, Heartbeat(worker="w"))
    (router,) = hub._sockets
    assert select.select([router], [], [], SECONDS)[0]  # arrived, and the loop has not run since
    hub.send(worker.address, Heartbeat(worker="h"))
    assert not select.select([router], [], [], 0)[0]
    assert await asyncio.wait_for(receiving, SECONDS) == (worker.address, Heartbeat(worker="w"))


async def test_a_hub_belongs_to_one_loop(opened, tmp_path):
    hub = open_hub(opened, tmp_path)
    worker = open_worker(opened, hub, f"ipc://{tmp_path}")
    worker.send(ORCHESTRATOR, Heartbeat(worker="w"))
    await hear(hub)

    def elsewhere():
        asyncio.run(hub.receive())

    with pytest.raises(TransportError, match="event loop"):
        await asyncio.to_thread(elsewhere)


# --- death ----------------------------------------------------------------------------------------

CHILD = """
import sys
import numpy as np
from omnistage.transport import ORCHESTRATOR, ZmqEndpoint, host_id
from omnistage.transport.messages import Chunk, Hello, PeerGone
from omnistage.types import HostTensor, Payload, PortType

run_id, control, bind = sys.argv[1:]
endpoint = ZmqEndpoint(name="child", run_id=run_id, control=control, bind=bind)
endpoint.send(ORCHESTRATOR, Hello(worker="child", stage="s", address=endpoint.address, pid=0, host=host_id()))
pinned = endpoint.share(HostTensor.from_numpy(np.full(1 << 20, 7, np.uint8)))
received = {type(message): message for message in (endpoint.receive(None), endpoint.receive(None))}
chunk, peer = received[Chunk], received[PeerGone].address  # the chunk is never released
for sequence in range(3):
    tensors = {"pcm": pinned, "copy": HostTensor("uint8", (99999,), b"x" * 99999)}
    payload = Payload(PortType.PCM, tensors=tensors)
    endpoint.send(peer, Chunk(key=chunk.key, edge="e", sequence=sequence, payload=payload))
endpoint.receive(None)
"""


@pytest.mark.processes
async def test_a_killed_process_leaves_nothing_behind(opened, tmp_path, make_chunk):
    hub = open_hub(opened, tmp_path)
    worker = open_worker(opened, hub, f"ipc://{tmp_path}")
    command = [sys.executable, "-c", CHILD, RUN, hub.address, f"ipc://{tmp_path}"]
    with subprocess.Popen(command) as child:  # noqa: ASYNC220 (returns at once)
        address, hello = await hear(hub)
        assert isinstance(hello, Hello)
        assert hello.address == address
        worker.send(address, make_chunk(0, nbytes=LARGE))
        hub.send(address, PeerGone(address=worker.address))  # here just a way to tell it an address
        received = [take(worker) for _ in range(3)]
        assert worker.stats()["slots_in_use"] == 1
        child.send_signal(signal.SIGKILL)
    left = list(shared_directory().glob(f"omnistage-{RUN}-child-*"))
    assert len(left) == 1
    assert remove_leftovers(RUN, "child") == 1
    hub.forget(address)
    worker.forget(address)
    assert worker.stats()["slots_in_use"] == 0
    for chunk in received:  # what had arrived stays readable
        assert (chunk.payload.tensors["pcm"].numpy() == 7).all()
        worker.release(chunk)
    assert worker.receive(0) is None
    assert worker.stats()["tensors_held"] == 0
    with pytest.raises(TransportError):
        hub.send(address, Heartbeat(worker="h"))
    del received, chunk

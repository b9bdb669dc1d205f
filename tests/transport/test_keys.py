import pytest
import zmq

from omnistage.errors import TransportError
from omnistage.transport.keys import ClusterKeys, check_listen_url


def test_keys_are_read_as_they_were_saved(tmp_path):
    keys = ClusterKeys.generate()
    path = tmp_path / "keys"
    keys.save(path)
    assert ClusterKeys.load(path) == keys
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        keys.save(path)


def test_the_secret_is_not_printed():
    keys = ClusterKeys.generate()
    assert keys.secret.decode() not in repr(keys)


@pytest.mark.parametrize("content", [b"", b"one", b"a b c", b"\xff\xfe \xfd", b"x" * 40 + b"\n" + b"y" * 40])
def test_damaged_key_files_are_refused(tmp_path, content):
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(TransportError, match="copy the orchestrator's"):
        ClusterKeys.load(path)


def test_keys_of_different_pairs_are_refused(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(zmq.curve_keypair()[0] + b"\n" + zmq.curve_keypair()[1])
    with pytest.raises(TransportError, match="belong together"):
        ClusterKeys.load(path)
    with pytest.raises(TransportError, match="cannot be read"):
        ClusterKeys.load(tmp_path / "missing")


@pytest.mark.parametrize(
    "url", ["tcp://0.0.0.0:0", "tcp://*:5555", "tcp://192.0.2.1:1", "tcp://eth0:1", "tcp://[::]:1"]
)
def test_open_ports_need_keys(url):
    with pytest.raises(TransportError, match="keys"):
        check_listen_url(url, None)
    check_listen_url(url, ClusterKeys.generate())


@pytest.mark.parametrize(
    "url", ["tcp://127.0.0.1:0", "tcp://127.0.0.2:1", "tcp://localhost:1", "tcp://[::1]:1"]
)
def test_loopback_does_without(url):
    check_listen_url(url, None)

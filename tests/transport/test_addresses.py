import subprocess
import sys

import pytest

from omnistage.errors import TransportError
from omnistage.transport.addresses import Address, check_address, host_id, unique_name

BOTH = Address(name="w.1", host="h", ipc="ipc:///tmp/x.sock", tcp="tcp://127.0.0.1:5")


@pytest.mark.parametrize(
    "address",
    [
        BOTH,
        Address(name="w", host="h", ipc="ipc:///x"),
        Address(name="w", host="h", tcp="tcp://a:1", shares_memory=False),
    ],
)
def test_addresses_are_read_as_they_were_written(address):
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@",
        "w@h",
        "w|ipc:///x",
        "@h|ipc:///x",
        "w@h|udp://x",
        "w@h|ipc:///x|ipc:///y",
        "w@h/disk|ipc:///x",
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(TransportError, match="not an endpoint's address"):
        Address.parse(text)


def test_ipc_is_for_the_own_host():
    assert BOTH.url_from("h") == "ipc:///tmp/x.sock"
    assert BOTH.url_from("elsewhere") == "tcp://127.0.0.1:5"
    with pytest.raises(TransportError, match="give it a tcp address"):
        Address(name="w", host="h", ipc="ipc:///x").url_from("elsewhere")


def test_limits_of_the_sockets_are_checked():
    with pytest.raises(TransportError, match="107 bytes"):
        check_address(Address(name="w", host="h", ipc="ipc:///" + "x" * 107))
    with pytest.raises(TransportError, match="255 bytes"):
        check_address(Address(name="w" * 255, host="h", tcp="tcp://a:1"))
    with pytest.raises(TransportError, match="may contain"):
        unique_name("a/b")


def test_names_are_never_used_twice():
    assert unique_name("w") != unique_name("w")


def test_the_package_imports_no_torch_and_host_ids_agree():
    code = (
        "import sys, omnistage.transport as t; print(t.host_id());"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == host_id()

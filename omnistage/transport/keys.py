"""The cluster's CURVE key pair and the check that admits only its holders.

Every process of a cluster has the same pair and uses it as server and as client, so whoever lacks
the secret can neither read nor connect.  ipc sockets need none: the run directory's permissions
guard them.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from omnistage.errors import TransportError


@dataclass(frozen=True)
class ClusterKeys:
    """Both in Z85, 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> ClusterKeys:
        return cls(*zmq.curve_keypair())

    def save(self, path: Path) -> None:
        """Write a file that only its owner can read.  Raises FileExistsError rather than replace one."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.public + b"\n" + self.secret + b"\n")

    @classmethod
    def load(cls, path: Path) -> ClusterKeys:
        """Raises TransportError if the file is not a pair of keys that belong together."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise TransportError(
                f"the key file {path} cannot be read ({error.strerror}); copy the orchestrator's"
            ) from error
        try:
            public, secret = content.split()
            is_pair = zmq.curve_public(secret) == public
        except (ValueError, zmq.ZMQError) as error:
            raise TransportError(
                f"{path} does not hold a pair of keys; copy the orchestrator's file"
            ) from error
        if not is_pair:
            raise TransportError(f"the keys in {path} do not belong together; copy the orchestrator's file")
        return cls(public, secret)

    def use_as_client(self, socket: zmq.Socket[bytes]) -> None:
        """For the next connect()."""
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_serverkey = self.public

    def use_as_server(self, socket: zmq.Socket[bytes]) -> None:
        """For the next bind(); needs an admitting authenticator in the socket's context."""
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_server = True


class _AdmitOne:
    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def start_authenticator(context: zmq.Context[Any], keys: ClusterKeys) -> ThreadAuthenticator:
    """Admit clients with the cluster's public key only.  stop() it before the context ends."""
    authenticator = ThreadAuthenticator(context)
    authenticator.configure_curve_callback(domain="*", credentials_provider=_AdmitOne(keys.public))
    authenticator.start()
    return authenticator


def check_listen_url(url: str, keys: ClusterKeys | None) -> None:
    """Raises TransportError if others could connect to an unprotected tcp port."""
    host = url.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if keys is None and not is_local:
        raise TransportError(f"{url} is open to other machines; pass the cluster's keys to protect it")

"""Where an endpoint can be reached, and from which hosts through shared memory.

An address is one opaque string outside this package.  Inside, it reads
"name@host|ipc:///path|tcp://host:port", either URL may be absent; "host/frames" marks an endpoint
that takes no part in shared memory.  The name carries a random part, so an address is never used
twice, also not by the restarted replica of the same stage.
Knows nothing of sockets and messages.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
import uuid
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from omnistage.errors import TransportError

MAX_ADDRESS_BYTES = 255  # a ZeroMQ routing id
MAX_IPC_PATH_BYTES = 107  # sun_path of Linux without its final zero
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, kw_only=True)
class Address:
    """host: equal hosts share memory if they want to.  ipc, tcp: ZeroMQ URLs or None."""

    name: str
    host: str
    ipc: str | None = None
    tcp: str | None = None
    shares_memory: bool = True

    def __str__(self) -> str:
        head = f"{self.name}@{self.host}" + ("" if self.shares_memory else "/frames")
        return "|".join([head, *(url for url in (self.ipc, self.tcp) if url)])

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises TransportError if the text is not an address."""
        head, *urls = text.split("|")
        name, _, place = head.partition("@")
        host, slash, mode = place.partition("/")
        ipc = [url for url in urls if url.startswith("ipc://")]
        tcp = [url for url in urls if url.startswith("tcp://")]
        is_known = len(ipc) <= 1 and len(tcp) <= 1 and len(ipc) + len(tcp) == len(urls) > 0
        if not (
            is_known and slash + mode in ("", "/frames") and _NAME.fullmatch(name) and _NAME.fullmatch(host)
        ):
            raise TransportError(f"{text!r} is not an endpoint's address; pass one on as it was received")
        return cls(
            name=name,
            host=host,
            ipc=ipc[0] if ipc else None,
            tcp=tcp[0] if tcp else None,
            shares_memory=not mode,
        )

    def url_from(self, host: str) -> str:
        """The URL that a peer on `host` connects to.  Raises TransportError if there is none."""
        if self.ipc is not None and self.host == host:
            return self.ipc
        if self.tcp is not None:
            return self.tcp
        raise TransportError(
            f"{self.name} listens on {self.ipc} of host {self.host} only and cannot be reached from host "
            f"{host}; give it a tcp address to listen on"
        )


def check_address(address: Address) -> Address:
    """Check the parts against what ZeroMQ and Unix sockets allow.  Raises TransportError."""
    check_name(address.name)
    if address.ipc is not None and len(os.fsencode(address.ipc.removeprefix("ipc://"))) > MAX_IPC_PATH_BYTES:
        raise TransportError(
            f"socket path {address.ipc} is over {MAX_IPC_PATH_BYTES} bytes long; use a shorter run directory"
        )
    if len(str(address).encode()) > MAX_ADDRESS_BYTES:
        raise TransportError(
            f"address {address} is longer than {MAX_ADDRESS_BYTES} bytes; use a shorter run directory or name"
        )
    return address


def check_name(name: str) -> str:
    """A worker's or run's name as part of file names.  Raises TransportError."""
    if not _NAME.fullmatch(name):
        raise TransportError(f"name {name!r} may contain letters, digits, '.', '_' and '-' only")
    return name


def unique_name(name: str) -> str:
    return f"{check_name(name)}.{secrets.token_hex(4)}"


def shared_directory() -> Path:
    """Where segments live: memory-backed if the system has such a place."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


@lru_cache(maxsize=1)
def host_id() -> str:
    """16 hex digits, equal exactly for processes that can open each other's shared memory.

    Covers the kernel's boot, the mounted file system (containers have their own) and the user.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else str(uuid.getnode())
    directory = shared_directory()
    facts = (machine, str(directory), str(directory.stat().st_dev), str(os.getuid()))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]

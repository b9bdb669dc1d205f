"""Downloads of media: limits, redirects checked hop by hop, and no way into private networks."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from omnistage.errors import MediaError, MediaTooLarge
from omnistage.serving.fetching import Fetcher, is_public
from omnistage.serving.settings import MediaSettings

BODY = bytes(range(256)) * 8


class _Handler(BaseHTTPRequestHandler):
    seen: list[tuple[str, str]]
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.seen.append((self.path, self.headers["Host"]))
        path = self.path.partition("?")[0]
        if path == "/ok":
            self._send(200, BODY)
        elif path.startswith("/hop"):
            left = int(path[4:])
            self._send(302, b"", Location=f"/hop{left - 1}" if left else "/ok")
        elif path == "/to-private":
            self._send(302, b"", Location=f"http://127.0.0.2:{self.server.server_address[1]}/ok")
        elif path == "/to-file":
            self._send(302, b"", Location="file:///etc/passwd")
        elif path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(BODY)
            except OSError:
                self.close_connection = True
        elif path == "/slow":
            self.server.slow.wait(20)
            self._send(200, BODY)
        elif path == "/gzip":
            self._send(200, BODY, **{"Content-Encoding": "gzip"})
        else:
            self._send(404, b"none")

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None: ...


@pytest.fixture
def site() -> Iterator[ThreadingHTTPServer]:
    _Handler.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.slow = threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.slow.set()
    server.shutdown()
    thread.join()
    server.server_close()


async def fetch(url: str, max_bytes: int = 10_000, **settings: object) -> bytes:
    fetcher = Fetcher(MediaSettings(**settings))
    try:
        return await fetcher.fetch(url, max_bytes=max_bytes)
    finally:
        await fetcher.aclose()


def url(site: ThreadingHTTPServer, path: str, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{site.server_address[1]}{path}"


async def test_downloads_with_the_hosts_own_name(site: ThreadingHTTPServer):
    assert await fetch(url(site, "/ok?a=1#part", "localhost"), allow_private_hosts=True) == BODY
    assert _Handler.seen == [("/ok?a=1", f"localhost:{site.server_address[1]}")]


async def test_redirects_are_followed_up_to_the_limit(site: ThreadingHTTPServer):
    assert await fetch(url(site, "/hop3"), allow_private_hosts=True) == BODY
    with pytest.raises(MediaError, match="more than 2 redirects"):
        await fetch(url(site, "/hop3"), allow_private_hosts=True, max_redirects=2)


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("/none", MediaError, "status 404"),
        ("/to-file", MediaError, "not an http or https URL"),
        ("/gzip", MediaError, "compressed"),
        ("/endless", MediaTooLarge, "more than 10000 bytes"),
    ],
)
async def test_refused_answers(site: ThreadingHTTPServer, path: str, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        await fetch(url(site, path), allow_private_hosts=True)


async def test_declared_size_is_enough_to_refuse(site: ThreadingHTTPServer):
    with pytest.raises(MediaTooLarge, match="more than 100 bytes"):
        await fetch(url(site, "/ok"), max_bytes=100, allow_private_hosts=True)


async def test_a_slow_host_is_given_up(site: ThreadingHTTPServer):
    with pytest.raises(MediaError, match=r"not downloaded within 0.2 s|timed out|Timeout"):
        await fetch(url(site, "/slow"), allow_private_hosts=True, fetch_timeout=0.2)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0", "[::1]", "[::ffff:7f00:1]"]
)
async def test_private_hosts_are_refused_before_any_connection(site: ThreadingHTTPServer, host: str):
    with pytest.raises(MediaError, match="private, loopback or reserved"):
        await fetch(url(site, "/ok", host))
    assert _Handler.seen == []


async def test_every_hop_is_checked(site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch):
    """The first host passes for public; its redirect to a loopback address is refused."""
    from omnistage.serving import fetching

    monkeypatch.setattr(fetching, "is_public", lambda address: str(address) != "127.0.0.2")
    with pytest.raises(MediaError, match=r"127\.0\.0\.2 has a private"):
        await fetch(url(site, "/to-private"))
    assert [path for path, _ in _Handler.seen] == ["/to-private"]


async def test_connects_to_the_address_that_was_checked(
    site: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
):
    """A name server that answers differently the second time gains nothing: there is no second time."""
    import asyncio

    answers = iter(["127.0.0.1"])

    async def resolve(self, host, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    assert await fetch(url(site, "/ok", "rebinding.example"), allow_private_hosts=True) == BODY


async def test_one_private_address_among_public_ones_is_enough(monkeypatch: pytest.MonkeyPatch):
    import asyncio

    async def resolve(self, host, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("8.8.8.8", "10.0.0.1")]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    with pytest.raises(MediaError, match="private"):
        await fetch("http://mixed.example/a.png")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("http://user:secret@host/a", "user name"),
        ("http:///a", "not an http"),
        ("http://host:99999/a", "not a URL"),
        ("http://[::1/a", "not a URL"),
        ("http://no-such-host.invalid/a", "cannot be resolved"),
        ("http://" + "a" * 300 + ".example/", "cannot be"),
    ],
)
async def test_bad_urls(bad: str, words: str):
    with pytest.raises(MediaError, match=words) as caught:
        await fetch(bad)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("10.1.2.3", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("192.168.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::a00:1", False),
        ("ff02::1", False),
    ],
)
def test_is_public(address: str, expected: bool):
    assert is_public(ipaddress.ip_address(address)) is expected

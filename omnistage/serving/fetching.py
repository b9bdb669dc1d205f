"""Downloads media that a stranger's request names, without becoming the stranger's way into the network.

Every hop of a redirect is checked anew: the host is resolved once, all its addresses must be public,
and the connection goes to the address that was checked, so a second DNS answer changes nothing.
Proxies from the environment are not used: they would connect on their own judgement.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urljoin, urlsplit

import httpx

from omnistage.errors import MediaError, MediaTooLarge
from omnistage.serving.settings import MediaSettings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class Fetcher:
    """One pool of connections for a server's lifetime; aclose() it."""

    def __init__(self, settings: MediaSettings, *, verify: bool = True) -> None:
        self._settings = settings
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(settings.fetch_timeout, connect=min(10.0, settings.fetch_timeout)),
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # a pooled TLS session knows one host name
            verify=verify,
            headers={"User-Agent": "omnistage", "Accept-Encoding": "identity"},
        )

    async def fetch(self, url: str, *, max_bytes: int) -> bytes:
        """The body behind an http(s) URL.  Raises MediaError or MediaTooLarge."""
        timeout = self._settings.fetch_timeout
        try:
            async with asyncio.timeout(timeout):
                return await self._follow(url, max_bytes)
        except TimeoutError:
            raise MediaError(f"{_short(url)} was not downloaded within {timeout:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise MediaError(
                f"{_short(url)} cannot be downloaded ({error or type(error).__name__})"
            ) from None

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _follow(self, url: str, max_bytes: int) -> bytes:
        for _ in range(self._settings.max_redirects + 1):
            request = await self._request(url)
            response = await self._client.send(request, stream=True)
            try:
                location = response.headers.get("location")
                if response.status_code in _REDIRECTS and location:
                    url = urljoin(url, location)
                    continue
                return await _read(response, url, max_bytes)
            finally:
                await response.aclose()
        raise MediaError(f"{_short(url)}: more than {self._settings.max_redirects} redirects")

    async def _request(self, url: str) -> httpx.Request:
        """A request to the checked address, with the host's own name in Host and in TLS."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise MediaError(f"{_short(url)} is not a URL ({error})") from None
        if parts.scheme not in ("http", "https") or not host:
            raise MediaError(f"{_short(url)} is not an http or https URL")
        if parts.username is not None or parts.password is not None:
            raise MediaError("a media URL must not carry a user name or password")
        port = port or (443 if parts.scheme == "https" else 80)
        address = await self._resolve(host, port)
        literal = f"[{address}]" if address.version == 6 else str(address)
        target = httpx.URL(url).copy_with(host=literal, port=port, fragment=None)
        return self._client.build_request(
            "GET", target, headers={"Host": httpx.URL(url).netloc.decode()}, extensions={"sni_hostname": host}
        )

    async def _resolve(self, host: str, port: int) -> Address:
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise MediaError(f"the host {_short(host)} cannot be resolved ({error.strerror})") from None
        addresses = [ipaddress.ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers]
        if not self._settings.allow_private_hosts and not all(map(is_public, addresses)):
            raise MediaError(
                f"the host {_short(host)} has a private, loopback or reserved address; "
                "media is fetched from public hosts only",
                code="forbidden_media_host",
            )
        return addresses[0]


def is_public(address: Address) -> bool:
    """Whether an address, and any IPv4 address embedded in it, is reachable in the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            embedded.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(inner is not None and not is_public(inner) for inner in embedded):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast and not address.is_reserved


async def _read(response: httpx.Response, url: str, max_bytes: int) -> bytes:
    if response.status_code != 200:
        raise MediaError(f"{_short(url)} answers with status {response.status_code}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaError(f"{_short(url)} is sent compressed although it was asked for as it is")
    body = bytearray()
    declared = response.headers.get("content-length", "0")
    is_too_large = declared.isdigit() and int(declared) > max_bytes
    if not is_too_large:
        async for chunk in response.aiter_raw():
            body += chunk
            if is_too_large := len(body) > max_bytes:
                break
    if is_too_large:
        raise MediaTooLarge(f"{_short(url)} has more than {max_bytes} bytes; send a smaller file")
    return bytes(body)


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."

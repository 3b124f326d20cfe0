"""Where requests may go: to this machine, and nowhere else."""

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from cpuspec.errors import ConfigError, in_one_line


@dataclass(frozen=True)
class LocalAddress:
    """A server of this machine. host: for the Host header; path: what every request's path begins with.

    numbers: the loopback addresses to connect to. A name is looked up once, so that it cannot lead elsewhere later.
    """

    host: str
    port: int
    path: str
    numbers: tuple[str, ...]


def local_address(url: str) -> LocalAddress:
    """The server that a URL names. Raises ConfigError for any that is not of this machine: 127.0.0.0/8, ::1, names of these."""
    shown = in_one_line(url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:
        raise ConfigError(f"{shown!r} is not a URL: {error}") from None
    if parts.scheme != "http" or not host:
        raise ConfigError(f"got the address {shown!r}; wanted one of this machine with http://, as http://127.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(f"the address {shown!r} has more than host, port and path; wanted one as http://127.0.0.1:8000")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{in_one_line(host)} has no address: {error}; wanted a server of this machine, as 127.0.0.1") from None
    numbers = tuple(dict.fromkeys(str(where[0]) for *_, where in found))
    if strange := [number for number in numbers if not _is_loopback(number)]:
        leads = "" if strange[0] == host else f" leads to {strange[0]}, which"
        raise ConfigError(
            f"{in_one_line(host)}{leads} is not this machine's own address; load is sent to 127.0.0.0/8, ::1 and localhost only. "
            "Run the command on the machine of the server"
        )
    return LocalAddress(f"[{host}]" if ":" in host else host, port, parts.path.rstrip("/"), numbers)


def _is_loopback(number: str) -> bool:
    address = ipaddress.ip_address(number)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback

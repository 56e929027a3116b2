"""Sockets and interfaces of this machine."""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine, on that address alone.

    Where `host` is known to the others but is no address of this machine itself (behind a translating router), it
    listens on all of them.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6)


def answers(host: str, port: int, timeout_seconds: float) -> bool:
    """Return whether somebody listens at an address."""
    with suppress(OSError), socket.create_connection((host, port), timeout=timeout_seconds):
        return True
    return False


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface that leads to `host`, or None where that is not known.

    Knows IPv4 on Linux. gloo, left to itself, takes the one that the machine's own name resolves to, which on many
    systems is the loopback interface.
    """
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        probe.connect((host, 9))  # sends nothing; the kernel chooses the way
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None

"""Sockets and interfaces of this machine."""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens only on one address of this machine.

    If other machines reach this one as `host`, but no interface here has that address (behind NAT), the socket listens
    on all addresses.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6)


def answers(host: str, port: int, timeout_seconds: float) -> bool:
    """Return whether a process listens at an address."""
    with suppress(OSError), socket.create_connection((host, port), timeout=timeout_seconds):
        return True
    return False


def interface_towards(host: str) -> str | None:
    """Return the name of the network interface with the route to `host`, or None if it is not known.

    Works for IPv4 on Linux. By default gloo uses the interface to which the machine's own host name resolves, on many
    systems the loopback interface.
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; the kernel chooses the route
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if address_of(name) == own), None)
    return None


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface, or None if it has none or is not known (Linux only)."""
    with suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))[20:24])
    return None

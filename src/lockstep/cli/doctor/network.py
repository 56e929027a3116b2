"""This machine in its network: its name, interfaces and the port where ranks meet, found out without torch."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lockstep.cli.doctor.finding import Finding, Status, joined
from lockstep.launch.job import LOOPBACK, address_of, answers, interface_towards
from lockstep.masking import mask_words
from lockstep.topology import topology_if_known

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8  # in /sys/class/net/NAME/flags
_PATIENCE_SECONDS = 2.0
_LISTENS = "0A"  # in /proc/net/tcp


class Interface(NamedTuple):
    """A network interface: its IPv4 address, if any, and whether it is up and the loopback interface."""

    name: str
    address: str | None
    is_up: bool
    is_loopback: bool


def host(env: Mapping[str, str]) -> Finding:
    """Check that the names of this machine and of the one where ranks meet resolve."""
    name = socket.gethostname()
    own = addresses_of(name)
    others: list[tuple[Status, str, str]] = []
    if not own:
        remedy = "Add it to /etc/hosts or to the name server; without it, gloo takes the loopback interface."
        others.append(("warning", "this name does not resolve", remedy))
    at = topology_if_known(env)
    facts = {"name": name, "addresses": own}
    if at.master_addr is not None:
        facts["master_addresses"] = found = addresses_of(at.master_addr)
        if not found:
            says = f"MASTER_ADDR, {at.master_addr}, does not resolve: the ranks cannot meet there"
            others.append(
                ("fault", says, "Give the address or a name of the node of rank 0 that resolves on all nodes.")
            )
        elif at.num_nodes > 1 and all(address.startswith("127.") or address == "::1" for address in found):
            says = f"MASTER_ADDR, {at.master_addr}, is {found[0]} here, which no other node reaches"
            others.append(("fault", says, "Give an address of the node of rank 0 in the network between the nodes."))
    return joined("host", f"{name} ({', '.join(own) or 'no address'})", others, facts)


def addresses_of(name: str) -> list[str]:
    """Return the addresses to which a name resolves; none if there is no answer within seconds."""
    found: list[str] = []

    def resolve() -> None:
        with suppress(OSError, UnicodeError):
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

    asked = threading.Thread(target=resolve, daemon=True)
    asked.start()
    asked.join(_PATIENCE_SECONDS)
    return [*found]


def interfaces(env: Mapping[str, str]) -> Finding:
    """Check the interfaces, and that the one that gloo takes leads to the other ranks."""
    known = list(_interfaces())
    at = topology_if_known(env)
    several = at.num_nodes > 1
    given = env.get("GLOO_SOCKET_IFNAME", "")
    taken = given or interface_towards(at.master_addr if at.master_addr is not None and several else LOOPBACK)
    others: list[tuple[Status, str, str]] = []
    for each in known:
        if each.name not in given.split(","):
            continue
        remedy = f"Unset GLOO_SOCKET_IFNAME, bring {each.name} up, or name another interface."
        if not each.is_up or each.address is None:
            lacks = "is down" if not each.is_up else "has no IPv4 address"
            others.append(("fault", f"GLOO_SOCKET_IFNAME names {each.name}, which {lacks}", remedy))
        elif several and each.is_loopback:
            says = f"GLOO_SOCKET_IFNAME names {each.name}, the loopback interface, but the ranks are on several nodes"
            others.append(("fault", says, remedy))
    shown = ", ".join(f"{each.name} {each.address or '-'}{'' if each.is_up else ' (down)'}" for each in known)
    facts = {"interfaces": [each._asdict() for each in known], "gloo": taken}
    return joined("interfaces", f"{shown}; gloo takes {taken or 'that of the host name'}", others, facts)


def port(env: Mapping[str, str]) -> Finding:
    """Check MASTER_PORT: free where rank 0 will listen, and answering where the launcher's store does already."""
    text, at = env.get("MASTER_PORT", ""), topology_if_known(env)
    number = int(text) if text.isascii() and text.isdecimal() and 0 < int(text) < 2**16 else None
    if number is None:  # what is wrong with its text is a matter of the variables
        return Finding("port", "none is given: lockstep finds a free one")
    if at.agent_store and at.master_addr is not None:
        facts = {"port": number, "is_free": False}
        if answers(at.master_addr, number, _PATIENCE_SECONDS):
            return Finding("port", f"the launcher's store answers at {at.master_addr}:{number}", facts=facts)
        remedy = "Let a firewall pass it, and check that the launcher of node 0 is alive."
        return Finding("port", f"nobody answers at {at.master_addr}:{number}, MASTER_PORT", "fault", remedy, facts)
    if at.rank != 0:
        return Finding("port", f"{number}, where rank 0 will listen", facts={"port": number})
    why = _why_not(number)
    if why is None:
        return Finding("port", f"{number} (MASTER_PORT) is free", facts={"port": number, "is_free": True})
    owner = _owner(number)
    says = f"{number} (MASTER_PORT) {why}" + (f" by {owner}" if owner else "")
    remedy = "Choose another MASTER_PORT, the same for all ranks, or end that process; on one node, unset it."
    return Finding("port", says, "fault", remedy, {"port": number, "is_free": False, "owner": owner or None})


def _interfaces() -> Iterator[Interface]:
    for _, name in socket.if_nameindex():
        flags = 0
        with suppress(OSError):
            flags = int(Path("/sys/class/net", name, "flags").read_text(encoding="ascii"), 16)
        yield Interface(name, address_of(name), bool(flags & _IFF_UP), bool(flags & _IFF_LOOPBACK))


def _why_not(number: int) -> str | None:
    """Return why a store could not listen at a port of this machine; None if it could."""
    try:
        socket.create_server(("", number)).close()
    except OSError as error:
        return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened at ({error.strerror})"
    return None


def _owner(number: int) -> str:
    """Return which process listens at a port, as far as this user may know; an empty string if nobody does."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTENS and int(columns[1].rpartition(":")[2], 16) == number:
                    sockets.add(f"socket:[{columns[9]}]")
    if not sockets:
        return ""
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal() and any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                return f"process {process.name} ({' '.join(mask_words(words)).strip()[:100]})"
    return "a process of another user"

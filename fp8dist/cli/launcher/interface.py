"""Find the network interface on the route to node 0, without importing torch. IPv4 only."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
import sys
import time

from fp8dist.cli.launcher.environment import BadVariable

FAILED_COLLECTIVE = 5
"""Exit status if another rank or node is missing. tests/support/lab/exits.py has the same number."""

SIOCGIFCONF = 0x8912
"""Linux ioctl that lists the interfaces with an IPv4 address."""

NAME_SIZE, ADDRESS_AT, ENTRY_SIZE = 16, 20, 40
"""Layout of its ``struct ifreq`` in bytes: length of the name, offset of the address, total length."""

LOOPBACK = "lo"
"""Name of the loopback interface on Linux."""

ELSEWHERE = "203.0.113.1"
"""An address that no node has (RFC 5737), to find the interface of the default route."""


class Unreachable(Exception):
    """Another node cannot be reached or ended the job. The message is one line for the terminal."""


def chosen(host: str, patience: float = 0.0, name: str | None = None) -> tuple[str, str]:
    """Return (name, IPv4 address) of the interface on the route to ``host``.

    On ``host`` itself, return the interface that the other nodes reach.

    Args:
        host: node 0, as in MASTER_ADDR.
        patience: seconds to wait for the host's name to resolve. A cluster may publish names after its nodes start.
        name: the interface, if the user has chosen it. In a comma-separated list, the first one counts.

    Raises:
        BadVariable: this node has no interface ``name``; the interface cannot be determined without IFNAME; or the
            host has no IPv4 address.
        Unreachable: the host's name does not resolve within ``patience``, or there is no route to it.
    """
    if ":" in host:
        raise BadVariable(_only_ipv6(host, "is an IPv6 address"))
    own = addresses()
    if name is not None:
        first = name.split(",")[0]
        for address, interface in own.items():
            if interface == first:
                return first, address
        raise BadVariable(
            f"IFNAME {name}: this node has no {first} with an IPv4 address, only {', '.join(own.values())}"
        )
    there = _resolved(host, patience)
    if ipaddress.ip_address(there).is_loopback and not _means_loopback(host):
        # This is node 0, and its /etc/hosts maps the name to loopback. Other nodes resolve it differently.
        try:
            there = _source_towards(ELSEWHERE)
        except OSError:
            raise BadVariable(
                f"MASTER_ADDR {host} is {there} on this node, unreachable for others: set MASTER_ADDR to an IP address"
            ) from None
    source = there
    if there not in own:
        try:
            source = _source_towards(there)
        except OSError as error:
            raise Unreachable(f"MASTER_ADDR {host} ({there}) cannot be reached: {error.strerror or error}") from None
        if source not in own:
            raise BadVariable(
                f"MASTER_ADDR {host} ({there}) is reached from {source}, but no interface has this address: set IFNAME"
            )
    if own[source] == LOOPBACK and not ipaddress.ip_address(source).is_loopback:
        # Happens with routes per host rather than per network. gloo and NCCL would use 127.0.0.1.
        raise BadVariable(
            f"MASTER_ADDR {host} ({there}) is reached from {source}, an address of {LOOPBACK}: set IFNAME"
        )
    return own[source], source


def addresses() -> dict[str, str]:
    """Return this node's interface names by IPv4 address, in the kernel's order."""
    size = 64 * ENTRY_SIZE
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        while True:
            buffer = array.array("B", bytes(size))
            where, _ = buffer.buffer_info()
            answer = fcntl.ioctl(asked, SIOCGIFCONF, struct.pack("iP", size, where))
            used, _ = struct.unpack("iP", answer)
            if used < size:  # A full buffer may be truncated.
                break
            size *= 2
    found = {}
    for at in range(0, used, ENTRY_SIZE):
        entry = buffer[at : at + ENTRY_SIZE].tobytes()
        name = entry[:NAME_SIZE].split(b"\0")[0].decode().split(":")[0]  # An alias is named like eth0:1.
        found[socket.inet_ntoa(entry[ADDRESS_AT : ADDRESS_AT + 4])] = name
    return found


def _resolved(host: str, patience: float) -> str:
    deadline = time.monotonic() + patience
    notified = False
    while True:
        try:
            return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if error.errno != socket.EAI_AGAIN and _has_ipv6(host):
                raise BadVariable(_only_ipv6(host, "has IPv6 addresses only")) from None
            why = f"MASTER_ADDR {host}: {error.strerror or error}"
            if time.monotonic() >= deadline:
                raise Unreachable(why) from None
        if not notified:
            print(f"{why}; retrying for up to {patience:g} s", file=sys.stderr, flush=True)
            notified = True
        time.sleep(1.0)


def _has_ipv6(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None, socket.AF_INET6, socket.SOCK_STREAM))
    except OSError:
        return False


def _only_ipv6(host: str, why: str) -> str:
    return f"MASTER_ADDR {host} {why}: set IFNAME and LOCAL_ADDR to this node's interface and address"


def _means_loopback(host: str) -> bool:
    """Return True if the host is a loopback address or localhost, so all ranks run on this node."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _source_towards(address: str) -> str:
    """Return this node's source address for packets to ``address``. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((address, 9))
        return str(way.getsockname()[0])

"""A program that simulates the network between hosts and delays packets.

    python forwarder.py DEVICE PID=ADDRESS…

creates a TUN device of that name in the network namespace of each process, and forwards IPv4 packets between them. It
reads the latency in seconds from stdin, answers each line with "done", and exits at the end of stdin. It replaces the
kernel's ``tc netem`` where that is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
DESTINATION = slice(16, 20)  # In an IPv4 header.
SPIN = 0.0002
"""Seconds of busy waiting before a packet is due, because a sleep overshoots by about as much."""


def main() -> None:
    """Forward packets until stdin ends."""
    device, *ports = sys.argv[1:]
    devices: dict[bytes, int] = {}
    for port in ports:
        pid, _, address = port.partition("=")
        devices[socket.inet_aton(address)] = make_device(int(pid), device)
    with contextlib.suppress(OSError):  # Delays of this process would look like network latency.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("up", flush=True)
    carry(devices)


def make_device(pid: int, name: str) -> int:
    """Create a TUN device in the network namespace of a process. Return its file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def carry(devices: dict[bytes, int]) -> None:
    """Forward packets to the device of their destination, after the latency."""
    latency = 0.0
    under_way: deque[tuple[float, int, bytes]] = deque()  # (due time, destination, packet); all have the same delay
    commands = sys.stdin.fileno()
    pending = b""
    while True:
        timeout = None
        if under_way:
            timeout = max(0.0, under_way[0][0] - time.monotonic() - SPIN)
        ready, _, _ = select.select([commands, *devices.values()], [], [], timeout)
        now = time.monotonic()
        for descriptor in ready:
            if descriptor == commands:
                text = os.read(commands, 4096)
                if not text:
                    return
                *lines, pending = (pending + text).split(b"\n")
                for line in lines:
                    latency = float(line)
                    print("done", flush=True)
                continue
            with contextlib.suppress(BlockingIOError, OSError):  # Nothing left to read, or the device is down.
                while True:
                    packet = os.read(descriptor, 65536)
                    to = packet[DESTINATION]
                    if to in devices:
                        under_way.append((now + latency, devices[to], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, to_descriptor, packet = under_way.popleft()
            with contextlib.suppress(OSError):  # The device is down, or the host is gone.
                os.write(to_descriptor, packet)


if __name__ == "__main__":
    main()

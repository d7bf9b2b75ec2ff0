"""Passes the frames of two network interfaces on to each other, each frame so many seconds late.

The arguments are the seconds and the names of the interfaces, which this script makes and which end with it. Not every
kernel has a queueing discipline that delays frames (netem).
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
FRAME_BYTES_MAX = 65536


def interface(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


delay_seconds = float(sys.argv[1])
first, second = map(interface, sys.argv[2:])
print("ready", flush=True)
late: deque[tuple[float, int, bytes]] = deque()
"""When each frame is due, by the monotonic clock, the interface that gets it, and the frame. The first is due first."""
while True:
    wait_seconds = max(late[0][0] - time.monotonic(), 0) if late else None
    for fd in select.select([first, second], [], [], wait_seconds)[0]:
        late.append((time.monotonic() + delay_seconds, first + second - fd, os.read(fd, FRAME_BYTES_MAX)))
    while late and late[0][0] <= time.monotonic():
        os.write(*late.popleft()[1:])

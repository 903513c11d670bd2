"""Emulated links: one network namespace per rank, and links with a delay and a rate between them.

The links are those of `tc netem` where the kernel has it. Otherwise each namespace has a TUN device, and a process
passes packets from device to device, with the same delay and rate. Both need the rights of root and Linux.
"""

from __future__ import annotations

import fcntl
import heapq
import ipaddress
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from types import TracebackType

DEVICE = "petra0"
"""The network device of a rank, in its namespace."""
NETEM, TUN = "netem", "tun"
_MTU = 65000
"""Bytes of a packet. Large packets keep the emulation cheap."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class Unavailable(RuntimeError):
    """The system does not let this process emulate links."""


@dataclass(frozen=True)
class Link:
    """The speed of each link, in each direction."""

    delay: float = 0.0
    """Seconds from leaving the link to the arrival."""
    rate: float = inf
    """Bits per second."""

    def __str__(self) -> str:
        if self == Link():
            return "unthrottled"
        rate = "" if self.rate == inf else f"{self.rate / 1e6:g} Mb/s"
        return ", ".join(part for part in (f"{1e3 * self.delay:g} ms", rate) if part)


def emulation() -> str:
    """Return how links can be emulated here: `NETEM` or `TUN`.

    Raises:
        Unavailable: They cannot; the message says why.
    """
    name = f"petra-test-{os.getpid()}"
    _call("ip", "netns", "add", name)
    try:
        _call("ip", "-n", name, "link", "set", "lo", "up")
        try:
            _call("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
            return NETEM
        except Unavailable as no_netem:
            if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
                raise Unavailable(f"{no_netem}, and /dev/net/tun is missing") from None
            return TUN
    finally:
        _call("ip", "netns", "del", name)


class Network:
    """Namespaces of ranks, connected by links. A context manager.

    Args:
        ranks: The number of ranks.
        link: The speed of the links.
        kind: `NETEM` or `TUN`.
    """

    def __init__(self, ranks: int, link: Link, kind: str) -> None:
        self.ranks, self.link, self.kind = ranks, link, kind
        self._hub = f"petra-{os.getpid()}-hub"
        self._names = [f"petra-{os.getpid()}-{rank}" for rank in range(ranks)]
        self._switch: subprocess.Popen[bytes] | None = None

    def address(self, rank: int) -> str:
        """Return the address of a rank."""
        return f"10.77.0.{rank + 1}"

    def command(self, rank: int, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs a program in the namespace of a rank."""
        return ["ip", "netns", "exec", self._names[rank], *arguments]

    def __enter__(self) -> Network:
        try:
            for name in self._names:
                _call("ip", "netns", "add", name)
                _call("ip", "-n", name, "link", "set", "lo", "up")
            (self._veths if self.kind == NETEM else self._tuns)()
            for rank, name in enumerate(self._names):
                _call("ip", "-n", name, "addr", "add", f"{self.address(rank)}/24", "dev", DEVICE)
                _call("ip", "-n", name, "link", "set", DEVICE, "mtu", str(_MTU), "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
        for name in (*self._names, *([self._hub] if self.kind == NETEM else [])):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)  # noqa: S607

    def _veths(self) -> None:
        """Connect the namespaces with a bridge; each packet is delayed where it leaves a rank."""
        _call("ip", "netns", "add", self._hub)
        _call("ip", "-n", self._hub, "link", "add", "bridge", "mtu", str(_MTU), "type", "bridge")
        _call("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for rank, name in enumerate(self._names):
            port = f"rank{rank}"
            _call("ip", "-n", self._hub, "link", "add", port, "type", "veth", "peer", DEVICE, "netns", name)
            _call("ip", "-n", self._hub, "link", "set", port, "mtu", str(_MTU), "master", "bridge", "up")
            _call("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *netem(self.link))

    def _tuns(self) -> None:
        """Start the process that passes packets, and wait until it has moved its devices into the namespaces."""
        arguments = [sys.executable, __file__, repr(self.link.delay), repr(self.link.rate), *self._names]
        self._switch = subprocess.Popen(arguments, stdout=subprocess.PIPE)
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != b"ready\n":
            raise Unavailable("no TUN devices could be made")


def netem(link: Link) -> list[str]:
    """Return the arguments of `tc qdisc add` for a link."""
    rate = [] if link.rate == inf else ["rate", f"{link.rate:.0f}bit"]
    return ["netem", "limit", "10000", "delay", f"{1e6 * link.delay:.0f}us", *rate]


def pass_packets(link: Link, files: Sequence[int]) -> None:
    """Pass packets between TUN devices for ever. The file of rank r has the address that ends with r + 1."""
    free = dict[tuple[int, int], float]()  # when each link is free
    waiting: list[tuple[float, int, int, bytes]] = []  # arrival, number, receiver, packet
    number = 0
    while True:
        timeout = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        ready, _, _ = select.select(files, [], [], timeout)
        now = time.monotonic()
        for file in ready:
            packet = os.read(file, 2 * _MTU)
            to = int(ipaddress.ip_address(packet[16:20])) % 256 - 1 if packet[0] >> 4 == 4 else -1
            if not 0 <= to < len(files):
                continue
            left = max(now, free.get((file, to), 0.0)) + 8 * len(packet) / link.rate
            free[file, to] = left
            number += 1
            heapq.heappush(waiting, (left + link.delay, number, to, packet))
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            os.write(files[to], packet)


def _call(*arguments: str) -> None:
    """Run a command; raise `Unavailable` with its message if it fails."""
    try:
        found = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        raise Unavailable(f"the program {arguments[0]} is missing: install iproute2") from None
    if found.returncode:
        raise Unavailable(f"`{' '.join(arguments)}` failed: {found.stderr.strip() or found.returncode}")


def main(arguments: Sequence[str]) -> None:
    """Make one TUN device for each namespace, move it there, and pass packets."""
    delay, rate, *names = arguments
    files = []
    for number, name in enumerate(names):
        device = f"tun{os.getpid()}-{number}"
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _call("ip", "link", "set", device, "netns", name, "name", DEVICE)
        _call("ip", "-n", name, "link", "set", DEVICE, "txqueuelen", "10000")
        files.append(file)
    print("ready", flush=True)
    pass_packets(Link(float(delay), float(rate)), files)


if __name__ == "__main__":
    main(sys.argv[1:])

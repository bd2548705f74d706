"""Find out which hosts still answer on the network: there a host's death shows first.

A scheduler may take minutes to notice that a host has died (Slurm's SlurmdTimeout is 300 s by
default), and ranks that wait for a dead host cannot tell it from a slow one.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

PORT = 9  # discard (RFC 863): the kernel of a host that lives accepts or refuses it at once
CONTACT_SECONDS = 3.5  # seconds to wait; the kernel asks again after 1 and 3 s (RFC 6298)
FIRST = 1.0  # seconds of silence before hosts are asked; again after 2, 4, 8, ...
LONGEST = 60.0  # most seconds between two times that hosts are asked
CONNECTIONS_AT_ONCE = 200  # a process may often open no more than 1024 files

Address = tuple[int, Any]  # family and address, as `socket.getaddrinfo` gives them


class Contact:
    """Asks a job's hosts for an answer while the job is silent.

    Hosts that do not answer at the beginning, behind a firewall for instance, are not asked again.

    Args:
        names: the hosts.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._addresses: dict[str, Address] = {}
        self._due = FIRST
        threading.Thread(target=self._begin, args=(list(names),), daemon=True).start()

    def _begin(self, names: list[str]) -> None:
        addresses = {name: address for name in names if (address := resolved(name))}
        answers = answering(addresses)
        self._addresses = {name: addresses[name] for name in names if name in answers}

    def knows(self, name: str) -> bool:
        """Whether a host answered at the beginning."""
        return name in self._addresses

    def lost(self, names: Iterable[str]) -> list[str]:
        """The hosts that answered at the beginning, and now do not within CONTACT_SECONDS."""
        asked = {name: self._addresses[name] for name in names if name in self._addresses}
        answers = answering(asked)
        return [name for name in asked if name not in answers]

    def lost_in(self, names: Iterable[str], silence: float) -> list[str]:
        """Like `lost`, but hosts are asked only from time to time while the job is silent.

        Args:
            names: the hosts.
            silence: seconds without progress so far.
        """
        if silence < FIRST:
            self._due = FIRST
        if silence < self._due:
            return []
        self._due = silence + min(silence, LONGEST)
        return self.lost(names)


def resolved(name: str) -> Address | None:
    """The address of a host; None if its name has none."""
    with suppress(OSError, UnicodeError):
        family, _, _, _, address = socket.getaddrinfo(name, PORT, type=socket.SOCK_STREAM)[0]
        return family, address
    return None


def answering(addresses: Mapping[str, Address], seconds: float = CONTACT_SECONDS) -> set[str]:
    """The names of hosts that accept or refuse a connection.

    Args:
        addresses: address of each name.
        seconds: longest time to wait; the wait ends when all have answered.
    """
    names, answers = list(addresses), set[str]()
    for begin in range(0, len(names), CONNECTIONS_AT_ONCE):
        some = {name: addresses[name] for name in names[begin : begin + CONNECTIONS_AT_ONCE]}
        answers |= _answering(some, seconds)
    return answers


def _answering(addresses: Mapping[str, Address], seconds: float) -> set[str]:
    answers, end = set[str](), time.monotonic() + seconds
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for name, (family, address) in addresses.items():
            connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            connection.setblocking(False)
            code = connection.connect_ex(address)
            if code == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, name)
            elif code in (0, errno.ECONNREFUSED):
                answers.add(name)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                if code in (0, errno.ECONNREFUSED):
                    answers.add(key.data)
    return answers

"""The store that ranks meet at, served on the address that they connect to and on no other.

torch's own server listens on every interface, and whoever reaches it may write whom a group takes for lost.
"""

import contextlib
import datetime
import errno
import ipaddress
import logging
import socket
from typing import Any

import torch.distributed as dist

BACKLOG = 1024  # connections that wait to be accepted: ranks start at once

_log = logging.getLogger(__name__)


def serve_store(host: str, port: int, timeout_secs: float) -> dist.TCPStore:
    """Serve a store at `host`, and connect to it.

    If `host` is no address of this machine (that of a gateway or a container's host, say), the store listens on every
    interface, and a warning says so.

    Args:
        host: name or address by which every rank reaches this one. port: 0 picks a free one. timeout_secs: of waits.
    Errors: RuntimeError for a port that cannot be had, and as of `TCPStore`. Local.
    """
    listener = listen(host, port)
    options: dict[str, Any] = {}
    if listener is not None:
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()
    timeout = datetime.timedelta(seconds=timeout_secs)
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, **options)


def listen(host: str, port: int) -> socket.socket | None:
    """Listen at the first address of `host` that is this machine's, IPv4 first; None, and a warning, if none is.

    A name that stands for the loopback here, as /etc/hosts of Debian has it for a machine's own, stands for another
    address elsewhere: such addresses count only if `host` says so itself, as an address or as "localhost".
    Errors: RuntimeError for a port that is in use or not allowed. Local.
    """
    for family, address in _addresses(host, port):
        with contextlib.ExitStack() as undo:
            try:
                listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch: a restart need not wait
                listener.bind(address)
                listener.listen(BACKLOG)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue
                raise RuntimeError(f"the store cannot listen at {host}, port {port}: {error}") from None
            undo.pop_all()
            return listener
    _log.warning("%s is no address of this machine: the store listens on every interface, port %d", host, port)
    return None


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of a host that may be listened at, IPv4 first; none if its name is not known."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    written = host == "localhost" or _is_loopback(host)
    chosen = [(family, address) for family, _, _, _, address in found if written or not _is_loopback(address[0])]
    return sorted(chosen, key=lambda place: place[0] != socket.AF_INET)


def _is_loopback(address: Any) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False

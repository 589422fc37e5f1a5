"""The store that ranks join through, which listens only on the address that they connect to.

torch's own server listens on every interface, and anyone who reaches it could write to it that a rank is lost. Other
users of this machine, or hosts of the nodes' network, do reach ours: a secret of the launch, which ranks get from their
launcher and never from the store, is part of every key, and no bytes of a store are read but as JSON.
"""

import contextlib
import dataclasses
import datetime
import errno
import hmac
import ipaddress
import logging
import socket
from typing import Any

import torch.distributed as dist

from ep_moe.environment import LaunchEnv, launch_secret

BACKLOG = 1024  # connections that wait to be accepted: all ranks connect at the same time
LONGEST_WAIT = datetime.timedelta(days=20)  # that fits the store's milliseconds

_log = logging.getLogger(__name__)


def secret_key(secret: str, name: str) -> str:
    """The key, or prefix of keys, of this name in a launch with a secret; the name itself without one. Local.

    A digest of both, which does not help to find other keys: a store lists its keys to everyone, though not those of
    its queues.
    """
    return f"{name}/{hmac.digest(secret.encode(), name.encode(), 'sha256').hex()}" if secret else name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StorePlace:
    """Where a launch's store is, for processes that are none of its ranks. The secret is shown to nobody else."""

    host: str
    port: int
    secret: str = dataclasses.field(repr=False)

    @classmethod
    def from_env(cls) -> "StorePlace":
        """That of the launch which this process is a rank of. Errors: RuntimeError outside of a launch. Local."""
        env = LaunchEnv.from_environ()
        if env is None:
            raise RuntimeError("this process is no rank of a launch: RANK is not set")
        return cls(host=env.master_addr, port=env.master_port, secret=launch_secret())

    def connect(self, name: str) -> dist.Store:
        """A new connection, for one thread at a time, under keys of that name, whose waits have no timeout.

        Errors: those of `TCPStore` if the store does not answer. Local.
        """
        store = dist.TCPStore(self.host, self.port, wait_for_workers=False)
        store.set_timeout(LONGEST_WAIT)
        return dist.PrefixStore(secret_key(self.secret, name), store)


def serve_store(host: str, port: int, timeout_secs: float) -> dist.TCPStore:
    """Serve a store at `host`, and connect to it.

    If `host` is not an address of this machine (for example that of a gateway or of a container's host), the store
    listens on every interface and logs a warning.

    Args:
        host: name or address by which every rank reaches this one. port: 0 picks a free one.
        timeout_secs: of the store's own waits.
    Errors: RuntimeError for a port that is in use or not allowed, and those of `TCPStore`. Local.
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

    A name that resolves to the loopback here (Debian's /etc/hosts does so for a machine's own name) resolves to another
    address elsewhere: loopback addresses count only if `host` is one, or is "localhost".
    Errors: RuntimeError for a port that is in use or not allowed. Local.
    """
    for family, address in _addresses(host, port):
        with contextlib.ExitStack() as undo:
            try:
                listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch: restarts need not wait
                listener.bind(address)
                listener.listen(BACKLOG)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue
                raise RuntimeError(f"the store cannot listen at {host}, port {port}: {error}") from None
            undo.pop_all()
            return listener
    _log.warning("%s is not an address of this machine: the store listens on every interface, port %d", host, port)
    return None


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of a host to try listening at, IPv4 first; none if its name does not resolve."""
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

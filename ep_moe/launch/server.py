"""The server that forks the ranks of this machine.

This module imports no torch: the server, whose imports take seconds, can start before this process has imported it.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util

from ep_moe.launch.signals import held_back

SOCKET_FOLDER_BYTES = 75  # a socket's path has at most 107 (linux/un.h), of which multiprocessing adds 32


def start_server(preload: Sequence[str] = ()) -> None:
    """Start the server that forks ranks ahead of the first launch; it imports in the background.

    Args:
        preload: as in `launch`; without effect if the server is running already.
    """
    modules = ["ep_moe.launch.forking", "torch", "torch.distributed", *preload]
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    open_standard_descriptors()
    _choose_socket_folder()
    resource_tracker.ensure_running()  # first: the server's start would start it too, and that unblocks SIGINT
    with held_back(signal.SIGINT), _path_in_environment():  # on Ctrl-C during its imports it would print a traceback
        forkserver.ensure_running()


@contextlib.contextmanager
def _path_in_environment() -> Iterator[None]:
    """Let processes that start meanwhile import what this one can: Python 3.11, for one, gives the server no path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _choose_socket_folder() -> None:
    """Let multiprocessing put its sockets into /tmp if the folder that TMPDIR names is too long for them.

    Errors: RuntimeError if /tmp is no folder to write to.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= SOCKET_FOLDER_BYTES:
        return
    tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()  # made once in a process
    except OSError as error:
        raise RuntimeError(
            f"TMPDIR ({folder!r}) has {len(os.fsencode(folder))} bytes, sockets of ranks take at most "
            f"{SOCKET_FOLDER_BYTES}, and /tmp cannot be used: {error}"
        ) from None
    finally:
        tempfile.tempdir = folder


def open_standard_descriptors() -> None:
    """Open /dev/null in place of closed standard streams: else a socket gets the number to which libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number

"""How local workers find a pool node and get its memory: two Unix sockets and a lock file.

    NAME.sock   authenticated messages (core/net.py)
    NAME.fds    sends the descriptors of the segments and closes; for processes of the same user
    NAME.lock   held by the living node; the kernel drops it with the process

All are in a directory of mode 0700. Files whose lock nobody holds belong to a killed node.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from pathlib import Path

import msgpack

from core.errors import ConfigError, ConnectionLost, WireError
from core.ids import Address, Incarnation, PoolRef
from kvpool.memory import MAX_SEGMENTS, Layout, Segments, close_all

_MAX_OFFER_BYTES = 4096
_MAX_SOCKET_PATH_BYTES = 107
_PEER_CREDENTIALS = struct.Struct("3i")


def socket_path(directory: Path, name: str) -> Path:
    """Where the node `name` of this host listens for messages; the same for all its lives."""
    return directory / f"{name}.sock"


def descriptor_path(sock: Path) -> Path:
    """Where the node that listens at `sock` hands out its segments."""
    return sock.with_suffix(".fds")


class NameLock:
    """The right of one living process to be the node `name` of a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        """Take the lock and remove what a killed node of that name left.

        Raises `ConfigError` when another process holds it.
        """
        sock = socket_path(directory, name)
        if "/" in name or len(os.fsencode(sock)) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"{sock} is no usable socket path: use a shorter directory or name")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        self._path = directory / f"{name}.lock"
        fd = _try_lock(self._path)
        if fd is None:
            raise ConfigError(
                f"a pool node {name!r} already runs in {directory}: stop it or use another name"
            )
        self._fd = fd
        for path in (sock, descriptor_path(sock)):
            path.unlink(missing_ok=True)

    def release(self) -> None:
        """Give the name back; the sockets are gone with their listeners."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _try_lock(path: Path) -> int | None:
    """Open and lock `path`; `None` when somebody else holds it."""
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before may have removed the file between our open and our lock.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        os.close(fd)


def reap_dead(directory: Path) -> list[str]:
    """Remove the files of every node of `directory` whose process is gone; return their names."""
    reaped = []
    for lock in directory.glob("*.lock"):
        if (fd := _try_lock(lock)) is not None:
            sock = socket_path(directory, lock.stem)
            for path in (sock, descriptor_path(sock), lock):
                path.unlink(missing_ok=True)
            os.close(fd)
            reaped.append(lock.stem)
    return reaped


class DescriptorServer:
    """Hands the segments of a node to processes of the same user."""

    def __init__(self, path: Path, ref: PoolRef, layout: Layout, fds: list[int]) -> None:
        """Listen at `path` within the running loop; `fds` stay the caller's."""
        self._offer = msgpack.packb(
            [ref.name, ref.incarnation, ref.address.host, ref.address.port, layout.num_slots,
             layout.slot_bytes, layout.num_layers, layout.slots_per_segment]
        )  # fmt: skip
        self._fds = fds
        self._path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.setblocking(False)
            self._sock.bind(str(path))
            path.chmod(0o600)
            self._sock.listen(16)
        except BaseException:
            self._sock.close()
            raise
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self._sock.accept()
        except OSError:
            return  # the client left already
        with client:
            size = _PEER_CREDENTIALS.size
            raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            _, uid, _ = _PEER_CREDENTIALS.unpack(raw)
            if uid != os.getuid():
                return
            client.setblocking(False)
            try:  # one packet into an empty buffer: it fits or the client is gone
                socket.send_fds(client, [self._offer], self._fds)
            except OSError:
                return

    def close(self) -> None:
        """Stop listening."""
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self._path.unlink(missing_ok=True)


def receive_segments(path: Path, timeout_s: float) -> tuple[PoolRef, Segments]:
    """Ask the node behind `path` for its memory; blocks. Raises `ConnectionLost`, `WireError`."""
    fds: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(path))
            offer, fds, _, _ = socket.recv_fds(sock, _MAX_OFFER_BYTES, MAX_SEGMENTS + 1)
        except OSError as error:
            raise ConnectionLost(f"no pool node at {path}: {error}") from error
    try:
        match msgpack.unpackb(offer, use_list=False) if offer else None:
            case (
                str(name), str(incarnation), str(host), int(port),
                int(num_slots), int(slot_bytes), int(num_layers), int(slots_per_segment),
            ):  # fmt: skip
                ref = PoolRef(name, Incarnation(incarnation), Address(host, port))
                layout = Layout(num_slots, slot_bytes, num_layers, slots_per_segment)
                return ref, Segments(layout, fds)
            case _:
                raise WireError(f"the pool node at {path} refused to hand over its memory")
    finally:
        close_all(fds)

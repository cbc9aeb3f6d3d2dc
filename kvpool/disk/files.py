"""Extent files and the calls that touch them: a directory of one process, mode 0700.

Direct I/O is used where it is taken (memory, offset and length aligned, a file system that can);
elsewhere buffered I/O, whose pages are dropped again, or the cache would hold every block twice.
The directory itself is locked, so that nothing but extents is in it: 16 hex digits each.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from core.errors import ConfigError

_NAME_DIGITS = 16
_MODE = 0o700
_FILE_MODE = 0o600


class SystemCalls:
    """What the kernel is asked for; a test puts faults in between. All raise `OSError`."""

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        """Open a file of the directory."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE, dir_fd=dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        """Remove a file of the directory."""
        os.unlink(name, dir_fd=dir_fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write; may write less than asked."""
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read; may read less than asked, 0 at the end."""
        return os.preadv(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """Have a file or a directory on the medium."""
        os.fsync(fd)


class ExtentFiles:
    """The extent files of one directory. Methods may be called from any thread."""

    def __init__(
        self, directory: Path, *, is_direct: bool, calls: SystemCalls | None = None
    ) -> None:
        """Create and lock the directory. Raises `ConfigError`; `close` unlocks it."""
        self.is_direct = is_direct
        self.calls = calls or SystemCalls()
        try:
            directory.mkdir(mode=_MODE, parents=True, exist_ok=True)
            self.dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"the disk tier cannot use {directory}: {error.strerror}") from error
        try:
            self._claim(directory)
        except BaseException:
            os.close(self.dir_fd)
            raise

    def _claim(self, directory: Path) -> None:
        try:
            fcntl.flock(self.dir_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process has its disk tier in {directory}: give each node its own"
            ) from error
        if os.fstat(self.dir_fd).st_mode & 0o777 != _MODE:
            try:
                os.fchmod(self.dir_fd, _MODE)
            except OSError as error:
                raise ConfigError(
                    f"others can look into {directory} ({error.strerror}): make it mode 0700"
                ) from error

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self.dir_fd)

    def numbers(self) -> list[int]:
        """Return the numbers of all extent files. Other files are not ours and left alone."""
        names = os.listdir(self.dir_fd)  # noqa: PTH208 (of a descriptor)
        return sorted(
            int(name, 16) for name in names
            if len(name) == _NAME_DIGITS and set(name) <= set("0123456789abcdef")
        )  # fmt: skip

    def open(self, number: int, *, write: bool = False, create: bool = False) -> ExtentFile:
        """Open an extent. Raises `OSError`."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        return ExtentFile(self, _name(number), flags)

    def remove(self, number: int) -> None:
        """Remove an extent, lastingly; one that is not there is removed. Raises `OSError`."""
        with contextlib.suppress(FileNotFoundError):
            self.calls.unlink(_name(number), self.dir_fd)
        self.calls.sync(self.dir_fd)


class ExtentFile:
    """One open extent. All methods raise `OSError`."""

    def __init__(self, files: ExtentFiles, name: str, flags: int) -> None:
        self._files = files
        self._calls = files.calls
        self._name = name
        self._flags = flags
        self._is_direct = files.is_direct
        try:
            self._fd = self._open(os.O_DIRECT if self._is_direct else 0)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            self._is_direct = False
            self._fd = self._open(0)

    def _open(self, extra: int) -> int:
        return self._calls.open(self._name, self._flags | extra, self._files.dir_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def size(self) -> int:
        """Return its bytes."""
        return os.fstat(self._fd).st_size

    def write(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Write once; return how many bytes were written."""
        if self._is_direct:
            try:
                return self._calls.pwritev(self._fd, buffers, offset)
            except OSError as error:
                self._go_buffered(error)
        num_bytes = self._calls.pwritev(self._fd, buffers, offset)
        # Starts writing these pages out, and drops what earlier calls started.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return num_bytes

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Read once; return how many bytes were read, 0 at the end."""
        if self._is_direct:
            try:
                return self._calls.preadv(self._fd, buffers, offset)
            except OSError as error:
                self._go_buffered(error)
        num_bytes = self._calls.preadv(self._fd, buffers, offset)
        os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        return num_bytes

    def sync(self) -> None:
        """Have it on the medium."""
        self._calls.sync(self._fd)

    def _go_buffered(self, error: OSError) -> None:
        """Direct I/O refused this memory or length. Raises `error` when that is not the reason."""
        if error.errno != errno.EINVAL:
            raise error
        buffered = self._open(0)
        os.close(self._fd)
        self._fd, self._is_direct = buffered, False


def _name(number: int) -> str:
    return f"{number:0{_NAME_DIGITS}x}"

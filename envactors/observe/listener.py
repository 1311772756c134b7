"""The Unix sockets at which programs can be looked at: where they are, and those of this process.

Every program with actors imports this module, so it imports little. What is answered is in
`envactors.observe.monitor`, the client's side in `envactors.observe.programs`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
import threading
from pathlib import Path

_SUFFIX = ".sock"
# The longest path of a Unix socket on Linux, in bytes.
_LONGEST_PATH = 107
# How many clients may wait to be accepted.
_BACKLOG = 16


class Listener:
    """A listening socket of this user, shared by all who acquire the same path.

    Args:
        path: Path of the socket.

    Attributes:
        path: The absolute path.
        socket: The listening socket.
        closing: Set when the last user has released it.
        thread: The thread that serves clients; None until the first one connects.

    Raises:
        FileExistsError: The path is taken.
        OSError: The socket cannot be created there.
        ValueError: The path is too long for a socket.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path.absolute()  # the program may change its directory
        self.socket: socket.socket = _listen(self.path)
        self.closing: threading.Event = threading.Event()
        self.thread: threading.Thread | None = None
        self._inode = self.path.lstat().st_ino
        self._uses = 0

    @staticmethod
    def acquire(path: Path) -> Listener:
        """Return the listener of a path, and count one more use of it."""
        with _lock:
            listener = _listeners.get(path.absolute()) or Listener(path)
            _listeners[listener.path] = listener
            listener._uses += 1
            return listener

    def release(self) -> None:
        """Count one use less; after the last one remove the socket and tell the serving thread to end."""
        with _lock:
            self._uses -= 1
            if self._uses or _listeners.get(self.path) is not self:
                return
            del _listeners[self.path]
            self.unlink()
            self.closing.set()
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which then closes the socket
            if self.thread is None:
                self.socket.close()

    def start(self, thread: threading.Thread) -> None:
        """Start the thread that serves clients, unless there is one or the listener is closed.

        Raises:
            RuntimeError: The system has no thread left.
        """
        with _lock:
            if self.thread is None and not self.closing.is_set():
                thread.start()
                self.thread = thread

    def unlink(self) -> None:
        """Remove the socket's file, unless something else has taken its place."""
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()


def socket_directory() -> Path:
    """Return the directory of the sockets, which belongs to this user alone.

    Raises:
        OSError: The directory cannot be created.
        PermissionError: The directory belongs to another user, or others may write to it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        directory = Path(runtime) / "envactors"
    else:
        # Not `tempfile`, whose import would make the first actor of each program slower.
        directory = Path(os.environ.get("TMPDIR") or "/tmp") / f"envactors-{os.getuid()}"  # noqa: S108 # it is checked
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(
            f"{directory} is not a directory of this user alone: remove it, or set XDG_RUNTIME_DIR to another place"
        )
    return directory


def path_of(pid: int) -> Path:
    """Return the path of a program's socket."""
    return socket_directory() / f"{pid}{_SUFFIX}"


def sockets() -> dict[int, Path]:
    """Return the sockets of this user's programs by process id, and remove those whose program was killed."""
    found = {}
    for path in sorted(socket_directory().glob(f"*{_SUFFIX}")):
        if not path.stem.isdecimal():
            continue
        # A process of another container may have an id that means nothing here, so the socket is tried too.
        if _has_ended(int(path.stem)) and not is_listening(path):
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            found[int(path.stem)] = path
    return found


def is_listening(path: Path) -> bool:
    """Return whether a program listens there, whether it answers or not."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
        return True


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False  # it has changed its user
    return False


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ValueError(
            f"the path {str(path)!r} is too long for a Unix socket: expected {_LONGEST_PATH} bytes at most"
        )
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode) or is_listening(path):
            raise FileExistsError(f"{path} exists: expected no file there, or a socket that nobody listens to")
        path.unlink()  # of a program that was killed
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(str(path))
        path.chmod(0o600)  # nobody can connect before it listens
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


_lock = threading.RLock()
_listeners: dict[Path, Listener] = {}


def _unlink_all() -> None:
    for listener in [*_listeners.values()]:
        listener.unlink()  # threads and descriptors end with the process


def _forget_all() -> None:
    # The sockets stay those of the parent.
    global _lock
    _lock = threading.RLock()
    for listener in _listeners.values():
        listener.socket.close()
    _listeners.clear()


atexit.register(_unlink_all)
os.register_at_fork(after_in_child=_forget_all)

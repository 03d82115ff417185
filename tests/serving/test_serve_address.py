"""Where `fastspec serve` listens, and what it says where it cannot."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest
from helpers.serve import MARKS, Served, openai, served
from helpers.training import small_target
from typer.testing import CliRunner

import fastspec
from fastspec.errors import Unsupported
from fastspec.programs.cli.app import app
from fastspec.programs.serving.app import GONE, bound, run_server
from fastspec.programs.serving.requests import Limits

pytestmark = MARKS


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", "--port", str(port)])
    assert done.exit_code == 1 and f"127.0.0.1:{port} cannot be listened on (Address already in use)" in " ".join(
        done.output.split()
    )


def test_addresses_of_others_and_names_of_nobody_are_refused() -> None:
    for host in ("203.0.113.7", "no.such.host.invalid"):
        with pytest.raises(Unsupported, match="name another --port or --host"):
            bound(host, 0)
    with bound("localhost", 0) as found:
        assert found.getsockname()[1] > 0


def test_who_reads_that_it_serves_may_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the server's loop runs: a request waits for it, and none is turned away."""

    class Apart:
        key, loopback = None, False

    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: socket.create_connection(address).close())
    with bound("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        run_server(cast(Any, Apart()), listener)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_connections_end_where_nothing_is_acknowledged() -> None:
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == GONE


def test_a_body_of_megabytes_is_told_that_it_is_too_long() -> None:
    """The client sends all of it before it reads."""
    with served(fastspec.patch(small_target()), rows=1, assistant="nasd", limits=Limits(body=1 << 20)) as server:
        assert isinstance(server, Served)
        with pytest.raises(openai.APIStatusError, match="longer than 1048576 bytes") as told:
            server.client().completions.create(model="small", prompt="w" * 8_000_000)
        assert told.value.status_code == 413

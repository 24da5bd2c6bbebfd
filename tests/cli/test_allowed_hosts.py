"""Which hosts requests may name: a setting, or those of this machine where pages could use the service."""

import socket

import pytest

from server.cli import serve
from server.cli.command_settings import read_settings


@pytest.mark.parametrize(
    ("flags", "keys", "allowed"),
    [
        ([], (), ("localhost", "127.0.0.1", "[::1]")),
        ([], ("key",), ()),
        (["--allowed-hosts=*"], (), ()),
        (["--allowed-hosts=a.example,*.b.example"], ("key",), ("a.example", "*.b.example")),
    ],
)
def test_hosts_are_checked_if_pages_could_use_a_service_without_keys(flags, keys, allowed):
    settings = read_settings(flags)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert serve._allowed_hosts(settings, listener, keys) == allowed


@pytest.mark.parametrize("host", ["http://a", "a:80", "a b", "*a", "::1", "[::1]:80"])
def test_an_allowed_host_is_a_name_or_an_address_without_a_port(host, capsys):
    with pytest.raises(SystemExit):
        read_settings([f"--allowed-hosts=good,{host}"])

    assert "is not a host" in capsys.readouterr().err

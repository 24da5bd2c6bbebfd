"""Who counts as one client without a key."""

import pytest

from server.http.edge.api_keys import ApiKeys
from server.http.edge.client_name import client_of_address


def scope(host, *headers):
    return {"client": (host, 1234), "headers": [(b"x-forwarded-for", b"9.9.9.9"), *headers]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("::1", "127.0.0.1", False),
    ],
)
def test_an_address_or_a_network_of_64_bits_is_a_client(one, other, same):
    assert (client_of_address(scope(one)) == client_of_address(scope(other))) == same


def test_a_connection_without_an_address_is_one_client():
    assert client_of_address({"client": None}) == ""
    assert client_of_address({}) == ""


def test_the_key_is_the_client_whatever_the_address_and_an_unknown_key_is_none():
    keys = ApiKeys(["one", "two"])
    names = {
        keys.client_of(scope(host, header))
        for host in ("192.0.2.1", "192.0.2.2")
        for header in ((b"authorization", b"Bearer one"), (b"x-api-key", b"one"))
    }

    assert len(names) == 1
    assert "one" not in names.pop()
    assert keys.client_of(scope("192.0.2.1", (b"x-api-key", b"three"))) == "192.0.2.1"

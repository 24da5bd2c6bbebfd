"""`tessera complete` with a scripted server."""

import json
import socket
import subprocess
import sys

import pytest

from tests.cli import fake_server as fake
from tests.waiting import GIVE_UP

MODELS = fake.plain({"data": [{"id": "small"}, {"id": "large"}]})
NO_ROUTE = fake.plain({"error": "not found"}, "404 Not Found")
TEXT = fake.chunked(
    fake.openai_token("Hel"), 0.01, fake.openai_token("lo\n"), fake.openai_token("", "stop"),
    fake.openai_usage(2), fake.DONE,
)  # fmt: skip
TGI_TEXT = fake.chunked(fake.tgi_token("Hel"), fake.tgi_token("lo"), fake.tgi_last(3))


@pytest.fixture
def server(start):
    return start({"/v1/models": MODELS, "/v1/completions": TEXT})


def sent(server):
    return json.loads(server.requests[-1][2])


def test_the_answer_goes_to_standard_output_and_nothing_else(tessera, server):
    assert tessera("complete", server.url, "say") == (0, "Hello\n", "")


def test_the_request_names_the_first_model_and_has_only_the_given_fields(tessera, server):
    tessera("complete", server.url, "say")

    assert sent(server) == {"model": "small", "prompt": "say", "max_tokens": 256, "stream": True}


def test_flags_become_fields_of_the_request(tessera, server):
    tessera(
        "complete", server.url, "say", "--model=large", "--max-tokens=9", "--temperature=0",
        "--seed=-1", "--stop=a", "--stop", "b",
    )  # fmt: skip

    assert sent(server) == {
        "model": "large", "prompt": "say", "max_tokens": 9, "temperature": 0.0, "seed": -1,
        "stop": ["a", "b"], "stream": True,
    }  # fmt: skip


@pytest.mark.parametrize("words", [[], ["-"]])
def test_without_a_prompt_standard_input_is_the_prompt(tessera, server, typed, words):
    typed("from a file\n")
    tessera("complete", server.url, *words)

    assert sent(server)["prompt"] == "from a file\n"


def test_a_prompt_that_is_not_utf_8_is_one_line(tessera, server):
    status, out, err = tessera("complete", server.url, "\udcff")

    assert (status, out) == (1, "")
    assert err == "tessera complete: error: the text has bytes that are not UTF-8\n"


def test_one_word_that_is_no_url_is_the_prompt(tessera, server):
    tessera("complete", f"--url={server.url}", "Once upon a time")

    assert sent(server)["prompt"] == "Once upon a time"


def test_of_two_words_the_first_may_be_the_model(tessera, server):
    tessera("complete", "large", "say", f"--url={server.url}")

    assert (sent(server)["model"], sent(server)["prompt"]) == ("large", "say")


def test_an_empty_prompt_is_refused(tessera, server, typed):
    typed("")

    assert tessera("complete", server.url)[::2] == (
        2, "tessera complete: error: the prompt is empty\n",
    )  # fmt: skip


@pytest.mark.parametrize("variable", [True, False])
def test_the_key_is_a_bearer_token_of_every_request(tessera, server, monkeypatch, variable):
    monkeypatch.setenv("TESSERA_API_KEY", "secret" if variable else "other")
    tessera("complete", server.url, "say", *([] if variable else ["--api-key=secret"]))

    assert [headers["authorization"] for _, headers, _ in server.requests] == ["bearer secret"] * 2


def test_a_server_without_openais_api_is_asked_over_generate_stream(tessera, start):
    server = start({"/v1/models": NO_ROUTE, "/generate_stream": TGI_TEXT})

    status, out, _ = tessera("complete", server.url, "say", "--temperature=0.5", "--seed=3")

    assert (status, out) == (0, "Hello")
    assert sent(server) == {
        "inputs": "say",
        "parameters": {
            "details": True, "max_new_tokens": 256, "temperature": 0.5, "do_sample": True, "seed": 3,
        },
    }  # fmt: skip


def test_an_answer_at_the_limit_of_tokens_is_followed_by_a_remark(tessera, start):
    text = fake.chunked(fake.openai_token("a", "length"), fake.DONE)
    server = start({"/v1/models": MODELS, "/v1/completions": text})

    status, out, err = tessera("complete", server.url, "say")

    assert (status, out) == (0, "a")
    assert "limit of tokens" in err


def test_the_servers_warnings_are_shown_beside_the_answer(tessera, start):
    last = fake.event({"choices": [], "warnings": ["seed has no effect here"]})
    text = fake.chunked(fake.openai_token("a", "stop"), last, fake.DONE)
    server = start({"/v1/models": MODELS, "/v1/completions": text})

    _, out, err = tessera("complete", server.url, "say")

    assert (out, err) == ("a", "[seed has no effect here]\n")


def test_an_absent_server_is_an_error_that_says_how_to_start_one(tessera):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        status, out, err = tessera("complete", f":{port}", "say")

    assert (status, out) == (1, "")
    assert f"no server answers at http://127.0.0.1:{port} (Connection refused)" in err
    assert "`tessera serve`" in err
    assert err.count("\n") == 1


OPENAI_ERROR = {"error": {"message": "no model 'x'", "type": "invalid", "code": 404}}


@pytest.mark.parametrize(
    ("models", "answer", "words"),
    [
        (fake.plain({"error": "no key"}, "401 Unauthorized"), [], ["--api-key", "no key"]),
        (MODELS, fake.plain(OPENAI_ERROR, "404 Not Found"), ["404", "no model 'x'"]),
        (MODELS, fake.plain({"error": "loading"}, "503 Busy"), ["not ready", "loading"]),
        (MODELS, fake.plain(b"<html>", "500 Oops"), ["500", "<html>"]),
        (MODELS, fake.chunked(fake.event(OPENAI_ERROR)), ["no model 'x'"]),
        (MODELS, fake.chunked(b"data: {\n\n"), ["cannot be read"]),
        (MODELS, fake.chunked(fake.openai_token("a")), ["before the answer was complete"]),
        (MODELS, [*fake.chunked(fake.openai_token("a"))[:2], fake.HANG_UP], ["connection lost"]),
        (NO_ROUTE, fake.chunked(), ["no /v1/completions"]),
    ],
)
def test_a_refusal_is_one_line_with_the_servers_words(tessera, start, models, answer, words):
    server = start({"/v1/models": models, "/v1/completions": answer})

    status, _, err = tessera("complete", server.url, "say", "--model=x")

    assert status == 1
    assert err.startswith("tessera complete: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_a_reader_that_has_enough_ends_the_command_silently(start):
    tokens = [fake.openai_token("x" * 1000)] * 200
    text = fake.chunked(*tokens, fake.openai_token("", "stop"), fake.DONE)
    server = start({"/v1/models": MODELS, "/v1/completions": text})
    with subprocess.Popen(
        [sys.executable, "-m", "server.cli.main", "complete", server.url, "say"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        process.stdout.read(10)
        process.stdout.close()

        assert process.wait(GIVE_UP) == 0
        assert process.stderr.read() == b""

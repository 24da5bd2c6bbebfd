"""`tessera run` with a scripted service in place of the one that it uses or starts."""

import json
import socket

import pytest

from server.cli.run import command
from tests.cli import fake_server as fake

MODELS = fake.plain({"data": [{"id": "Qwen/Qwen3-0.6B"}, {"id": "bundled"}]})
CHAT = fake.plain({"model_use": "chat"})
COMPLETION = fake.plain({"model_use": "completion"})
ANSWER = fake.chunked(
    b'data: {"choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":"stop"}]}\n\n',
    fake.DONE,
)
TEXT = fake.chunked(fake.openai_token("lo\n", "stop"), fake.DONE)


@pytest.fixture
def serve(start):
    """Return a function that starts a server whose model is made for chat or for completion."""

    def begin(info=CHAT):
        return start(
            {
                "/v1/models": MODELS,
                "/health": fake.plain({"state": "ready", "phase": "ready"}),
                "/info": info,
                "/v1/chat/completions": ANSWER,
                "/v1/completions": TEXT,
            }
        )

    return begin


@pytest.fixture
def started(monkeypatch, serve):
    """Replace the start of a service; return the settings of those that were started."""
    services = []

    class Service:
        status = None

        def __init__(self, settings):
            self._server = serve(COMPLETION)
            services.append(settings)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            services.append("ended")

        def port(self):
            return int(self._server.url.rpartition(":")[2])

    monkeypatch.setattr(command, "ServiceProcess", Service)
    return services


def port(server):
    return server.url.rpartition(":")[2]


def sent(server):
    path, _, body = server.requests[-1]
    return path, json.loads(body)


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_a_running_service_with_the_model_answers(tessera, serve, started):
    server = serve()

    status, out, err = tessera("run", "qwen3-0.6b", "Hi", f"--port={port(server)}")

    assert (status, out) == (0, "Hello")
    assert err == f"[using the service at {server.url}]\n"
    path, body = sent(server)
    assert path == "/v1/chat/completions"
    assert body["model"] == "Qwen/Qwen3-0.6B"
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert started == []


@pytest.mark.parametrize(
    "words",
    [
        ["--model=qwen3-0.6b", "Hi"],
        ["Hi", "--model", "qwen3-0.6b"],
        ["qwen3-0.6b", "Hi", "--model=qwen3-0.6b"],
        ["-m", "qwen3-0.6b", "Hi"],
        ["--model-id=qwen3-0.6b", "Hi"],
    ],
)
def test_the_only_word_beside_a_model_that_is_given_as_a_flag_is_the_prompt(tessera, serve, words):
    server = serve()

    assert tessera("run", *words, f"--port={port(server)}")[1] == "Hello"
    assert sent(server)[1]["messages"] == [{"role": "user", "content": "Hi"}]


def test_flags_of_the_answer_are_sent(tessera, serve):
    server = serve()

    tessera(
        "run", "qwen3-0.6b", "Hi", f"--port={port(server)}", "--system=Be brief.", "--max-tokens=9",
        "--temperature=0", "--seed=1", "--stop=x",
    )  # fmt: skip

    _, body = sent(server)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name] for name in ("max_tokens", "temperature", "seed", "stop")} == {
        "max_tokens": 9, "temperature": 0.0, "seed": 1, "stop": ["x"],
    }  # fmt: skip


@pytest.mark.parametrize("words", [[], ["-"]])
def test_standard_input_is_one_message(tessera, serve, typed, words):
    server = serve()
    typed(" Hi \n")

    assert tessera("run", "qwen3-0.6b", *words, f"--port={port(server)}")[1] == "Hello"
    assert sent(server)[1]["messages"] == [{"role": "user", "content": "Hi"}]


def test_a_model_that_is_made_for_completion_continues_the_text(tessera, serve, typed):
    server = serve(COMPLETION)
    typed("def f(x):\n")

    assert tessera("run", "bundled", f"--port={port(server)}")[:2] == (0, "lo\n")
    path, body = sent(server)
    assert path == "/v1/completions"
    assert (body["prompt"], body["max_tokens"]) == ("def f(x):\n", 256)


def test_instructions_for_a_model_that_continues_texts_are_an_error(tessera, serve):
    server = serve(COMPLETION)

    status, _, err = tessera("run", "bundled", "x", f"--port={port(server)}", "--system=y")

    assert status == 1
    assert "--system: this model continues texts" in err


def test_without_a_running_service_one_is_started_and_ended(tessera, started, free_port):
    status, out, err = tessera("run", "bundled", "Hel", f"--port={free_port}", "--device=cpu")

    assert (status, out, err) == (0, "lo\n", "")
    settings, ended = started
    assert (settings.model, settings.port, settings.device) == ("bundled", free_port, "cpu")
    assert settings.log_level == "warning"
    assert ended == "ended"


def test_a_started_service_takes_a_free_port_unless_one_is_given(tessera, started):
    tessera("run", "bundled", "Hel", "--device=cpu")

    assert started[0].port == 0


@pytest.mark.parametrize("flags", [["--quantization=none"], ["--revision=v1"]])
def test_a_running_service_is_not_used_if_settings_of_the_engine_are_given(
    tessera, serve, started, flags, monkeypatch
):
    monkeypatch.setattr(command, "find_model", lambda _: None)
    server = serve()

    tessera("run", "qwen3-0.6b", "Hi", f"--port={port(server)}", *flags)

    assert len(started) == 2
    assert server.requests == []


def test_a_relative_folder_is_not_taken_for_the_same_folder_of_another_service(
    tessera,
    start,
    started,
    monkeypatch,
    tmp_path,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(command, "find_model", lambda _: None)
    server = start({"/v1/models": fake.plain({"data": [{"id": "model"}]})})

    tessera("run", "model", "Hi", f"--port={port(server)}")

    assert len(started) == 2
    assert server.requests == []


def test_a_mistake_is_reported_before_a_service_is_started(tessera, started):
    for words, says in (
        (["/absent", "x"], "no folder '/absent'"),
        (["bundled", "x", "--max-model-len=1000000", "--port=0"], "1000000"),
    ):
        status, out, err = tessera("run", *words)

        assert (status, out) == (1, "")
        assert err.startswith("tessera run: error: ")
        assert says in err
    assert started == []


def test_an_empty_prompt_is_an_error(tessera, serve):
    server = serve()

    status, _, err = tessera("run", "qwen3-0.6b", "", f"--port={port(server)}")

    assert status == 2
    assert err.endswith("tessera run: error: the prompt is empty\n")


def test_lines_on_a_terminal_are_continued_one_by_one(tessera, serve, monkeypatch):
    server = serve(COMPLETION)
    lines = iter(["def f(x):", "  ", "x = ", "/bye"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(lines))

    status, out, err = tessera("run", "bundled", f"--port={port(server)}")

    assert (status, out) == (0, "lo\nlo\n")
    assert "This model continues texts" in err
    texts = [body for path, _, body in server.requests if path == "/v1/completions"]
    prompts = [json.loads(body)["prompt"] for body in texts]
    assert prompts == ["def f(x):", "x = "]

"""`tessera bench serve`: output, result file and errors."""

import asyncio
import json

import pytest

from server.cli.main import main
from tests.cli import fake_server as fake

MODELS = fake.plain({"data": [{"id": "org/Some-Model", "owned_by": "somebody"}]})
COMPLETION = fake.chunked(
    fake.openai_token(), fake.openai_token(finish_reason="length"), fake.openai_usage(2), fake.DONE
)


@pytest.fixture
def bench(capsys):
    """Return a function: run the command against a scripted server; return status, output, errors and server."""

    def run(scripts, *arguments):
        async def with_server():
            async with fake.FakeServer(scripts) as server:
                flags = ["bench", "serve", f"--url={server.url}", *arguments]
                status = await asyncio.to_thread(_status, flags)
                return status, server

        status, server = asyncio.run(with_server())
        captured = capsys.readouterr()
        return status, captured.out, captured.err, server

    return run


def _status(flags):
    try:
        main(flags)
    except SystemExit as end:
        return end.code
    return 0


def test_an_openai_server_is_measured_and_the_result_has_the_common_rows(bench, tmp_path):
    status, out, err, server = bench(
        {"/v1/models": MODELS, "/v1/completions": COMPLETION},
        "--api=openai", "--concurrency", "1", "3", "--prompts=6", "--input-len=5-9",
        "--output-len=2", "--goodput=ttft:60000", "--header=Authorization: Bearer secret",
        f"--json={tmp_path}/",
    )  # fmt: skip

    assert status == 0
    assert "1 streams, 5-9 in, 2 out: 6 requests" in out
    assert "3 streams, 5-9 in, 2 out: 6 requests" in out
    assert "approximate" in err
    sent = [json.loads(body) for path, _, body in server.requests if path == "/v1/completions"]
    assert len(sent) == 1 + 6 + 3 + 6
    assert all(body["model"] == "org/Some-Model" for body in sent)
    assert len({body["prompt"] for body in sent}) == len(sent)
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("cpu-http-")
    assert "secret" not in file.read_text()
    result = json.loads(file.read_text())
    rows = {(row["metric"], row["batch"]): row for row in result["rows"]}
    assert {"http_tok_s", "ttft_ms", "itl_p99_ms", "goodput_s"} <= {m for m, _ in rows}
    assert rows["http_tok_s", 3]["model"] == "some-model"
    assert rows["http_tok_s", 3]["value"] > 0
    assert [run["completed"] for run in result["runs"]] == [6, 6]


def test_the_table_has_failures_by_category(bench):
    answers = iter([COMPLETION, *[COMPLETION, fake.plain({"error": "busy"}, "429 Busy")] * 3])
    status, out, _, _ = bench(
        {"/v1/completions": lambda _: next(answers), "/v1/models": MODELS},
        "--api=openai", "--prompts=6", "--warm-up=1",
    )  # fmt: skip

    assert status == 0
    assert "3 requests in" in out
    assert "3 failed" in out
    assert '3 x HTTP 429: {"error": "busy"}' in out


def test_a_failed_warm_up_is_an_error(bench):
    status, out, err, _ = bench(
        {"/v1/models": MODELS, "/v1/completions": fake.plain({"error": "no"}, "400 Bad")},
        "--api=openai",
    )

    assert (status, out) == (1, "")
    assert "HTTP 400" in err
    assert "no" in err


def test_a_run_without_complete_responses_exits_with_status_1(bench):
    answers = iter([COMPLETION, *[fake.plain({}, "500 Oops")] * 4])
    status, out, _, _ = bench(
        {"/v1/models": MODELS, "/v1/completions": lambda _: next(answers)},
        "--api=openai", "--prompts=4",
    )  # fmt: skip

    assert status == 1
    assert "4 x HTTP 500" in out


def test_requests_at_a_rate_are_sent_from_several_processes(bench):
    status, out, _, server = bench(
        {"/v1/models": MODELS, "/v1/completions": COMPLETION},
        "--api=openai", "--rate=100", "--prompts=9", "--processes=2", "--model=mine",
    )  # fmt: skip

    assert status == 0
    assert "100 requests/s, 256 in, 256 out: 9 requests" in out
    assert "sent late" in out
    assert "9 answers are shorter than asked for" in out
    assert json.loads(server.requests[-1][2])["model"] == "mine"


def test_the_client_waits_for_a_starting_server(bench):
    starting = fake.plain({}, "503 Service Unavailable")
    answers = iter([starting, starting, MODELS])
    status, _, _, _ = bench(
        {"/v1/models": lambda _: next(answers), "/v1/completions": COMPLETION},
        "--api=openai", "--wait=20", "--prompts=1",
    )  # fmt: skip

    assert status == 0


def test_an_absent_server_is_reported_in_one_line(capsys):
    assert _status(["bench", "serve", "--url=http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert "cannot connect" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--url=localhost:8000", ["--url", "http://127.0.0.1:8000"]),
        ("--input-len=5-3", ["--input-len", "shorter one"]),
        ("--goodput=itl:3", ["--goodput", "ttft, tpot, e2e"]),
        ("--rate=0", ["--rate", "more than 0"]),
        ("--concurrency=0", ["--concurrency", "at least 1"]),
        ("--header=nothing", ["--header", "NAME:VALUE"]),
        ("--prompts=-3", ["--prompts", "-3"]),
        ("--nonsense", ["--nonsense"]),
    ],
)
def test_the_error_for_a_wrong_flag_names_it(argument, words, capsys):
    assert _status(["bench", "serve", argument]) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error


def test_a_rate_excludes_a_concurrency(capsys):
    assert _status(["bench", "serve", "--rate=1", "--concurrency=2"]) == 2
    assert "not allowed with" in capsys.readouterr().err

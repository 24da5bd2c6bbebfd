import io
import json
import math
import stat
import struct
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import gguf
import numpy as np
import pytest

from benchmarks.cpu_peers import perplexity
from benchmarks.cpu_peers.contenders import ContenderError

HEADER = b"_logits_" + struct.pack("<iii", 4, 300, 2)
TOKENS = struct.pack("<8i", 5, 6, 7, 8, 9, 10, 11, 12)
WINDOWS = [[5, 6, 7, 8], [9, 10, 11, 12]]


def test_windows_are_read_from_what_precedes_the_probabilities():
    assert perplexity.read_windows(io.BytesIO(HEADER + TOKENS + b"rest")) == WINDOWS


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "instead of b'_logits_'"),
        (b"GGUF" + HEADER[4:] + TOKENS, "instead of b'_logits_'"),
        (HEADER[:-1], "and sizes"),
        (HEADER + TOKENS[:-1], "31 bytes of tokens instead of 32"),
    ],
)
def test_other_files_are_errors(data, error):
    with pytest.raises(ContenderError, match=error):
        perplexity.read_windows(io.BytesIO(data))


def program(folder, body):
    """Write a shell script that stands in for `llama-perplexity`; `$logits` is what it is to write to."""
    path = folder / "program"
    find = 'for word in "$@"; do [ "$last" = --save-all-logits ] && logits="$word"; last="$word"; done\n'
    path.write_text(f"#!/bin/sh\n{find}{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


def test_tokens_and_perplexity_of_llama_cpp_are_read_while_it_writes_more(tmp_path):
    (tmp_path / "data").write_bytes(HEADER + TOKENS)
    more = "head -c 3000000 /dev/zero"  # more than a pipe holds
    body = (
        f"(cat {tmp_path}/data; {more}) > $logits; echo 'Final estimate: PPL = 12.5000 +/- 2' >&2"
    )

    found = perplexity.llama_perplexity(program(tmp_path, body), "text", 4, 2)

    assert found == (12.5, WINDOWS)


def test_a_program_that_fails_is_an_error_with_its_last_words(tmp_path):
    body = ": > $logits; echo 'you need at least 8 tokens' >&2; exit 3"

    with pytest.raises(ContenderError, match=r"status 3: you need at least 8 tokens"):
        perplexity.llama_perplexity(program(tmp_path, body), "text", 4, 2)


def test_a_program_that_never_opens_the_file_is_an_error(tmp_path):
    before = threading.active_count()
    with pytest.raises(ContenderError, match="status 1: no such model"):
        perplexity.llama_perplexity(program(tmp_path, "echo no such model; exit 1"), "text", 4, 2)

    assert threading.active_count() == before


def write_metadata(path, add_bos):
    writer = gguf.GGUFWriter(path, "llama")
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_bos_token_id(1)
    writer.add_tensor("norm", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("asked", "first"), [(True, 1), (False, None)])
def test_windows_begin_with_the_token_that_the_file_asks_for(tmp_path, asked, first):
    write_metadata(tmp_path / "m.gguf", asked)

    found = perplexity.begun(WINDOWS, tmp_path / "m.gguf")

    assert found == [[first or ids[0], *ids[1:]] for ids in WINDOWS]


def test_a_file_that_leaves_the_beginning_open_is_refused(tmp_path):
    write_metadata(tmp_path / "m.gguf", None)

    with pytest.raises(ContenderError, match=r"m.gguf does not say whether a text begins"):
        perplexity.begun(WINDOWS, tmp_path / "m.gguf")


class Service(BaseHTTPRequestHandler):
    """Gives each token after the first the log-probability -id / 10."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["echo"]
        scores = [None, *(-it / 10 for it in body["prompt"][1:])]
        reply = json.dumps({"choices": [{"logprobs": {"token_logprobs": scores}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


def test_the_tokens_after_the_middle_one_are_scored():
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            found = perplexity.served_perplexity(url, WINDOWS)
        finally:
            server.shutdown()
            thread.join()

    assert found == pytest.approx(math.exp((0.8 + 1.2) / 2))

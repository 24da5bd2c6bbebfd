"""Collects receipts from a service under load, and has `tessera replay` compute them again: none may differ.

Streams send requests of every dialect one after the other, so that each is computed in a random company: greedy and
sampled, edits of a text and free text, with stop strings, penalties, biases, log-probabilities, grammars, several
choices, long prompts, common prefixes, deadlines, and with drafts and without. The KV cache is small, so that sequences
are preempted. The replay computes them in other companies.

    python -m tests.reliability.receipts --receipts 10000 --streams 32
    python -m tests.reliability.receipts --serve --device cuda --deterministic true

Exits with status 1 if a reply has no receipt, or if an output differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.report import add_bookkeeping, write_report
from tests.reliability.exchange import HOST, encode_post, read_reply
from tests.reliability.managed_service import ManagedService

if TYPE_CHECKING:
    from collections.abc import Iterator

_CACHE_TOKENS = 2048
_OK = 200
_LATE = (408, 504)
"""Statuses of a request with a deadline that has no token yet."""
_CODE = (
    "def read(path, mode):\n    with open(path) as file:\n        return file.read()\n",
    "class Node:\n    def __init__(self, value, children):\n        self.value = value\n",
    "for number in range(10):\n    total += values[number]\n",
    "import os\nimport sys\n\n\ndef main():\n    print(os.getcwd())\n",
)
_PATHS = (
    "/generate",
    "/generate_stream",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
_FORMATS = (
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "type": "object", "additionalProperties": False, "required": ["name", "size"],
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}}}}},
    {"type": "json_object"},
)  # fmt: skip
_REGEX = {"type": "regex", "value": "[a-z]{3,9}( [a-z]{3,9}){0,4}"}


class Request(NamedTuple):
    """One request: the path of its route, and its body, which asks for a receipt."""

    path: str
    body: dict[str, Any]


def random_requests(rng: random.Random, *, longest: int = 64) -> Iterator[Request]:
    """Yield requests without end.

    Args:
        rng: decides everything.
        longest: output in tokens.
    """
    while True:
        path = rng.choice(_PATHS)
        text = _prompt(rng)
        options = _sampling(rng) | {"receipt": True}
        tokens = rng.choice([1, 5, longest // 2, longest])
        chat = [{"role": "user", "content": text}]
        if path.startswith("/generate"):
            body: dict[str, Any] = {"inputs": text, "parameters": options}
            options |= {"max_new_tokens": tokens, "details": rng.random() < 0.5}
            if rng.random() < 0.3:
                options["stop"] = [rng.choice(["\n\n", "return", "("])]
            if rng.random() < 0.1:
                options["grammar"] = _REGEX
            if path == "/generate" and rng.random() < 0.1:
                options |= {"decoder_input_details": True, "top_n_tokens": rng.randint(1, 5)}
        else:
            body = options | {"stream": rng.random() < 0.5}
            if rng.random() < 0.3:
                body["stop"] = [rng.choice(["\n\n", "return", "("])]
            if path == "/v1/completions":
                body |= {"prompt": rng.choice([text, [text, _prompt(rng)]]), "max_tokens": tokens}
                body |= {"n": rng.choice([1, 1, 3]), "logprobs": rng.choice([None, 0, 4])}
            elif path == "/v1/chat/completions":
                body |= {"messages": chat, "max_tokens": tokens, "n": rng.choice([1, 2])}
                if rng.random() < 0.2:
                    body |= {"response_format": rng.choice(_FORMATS), "stop": None}
            elif path == "/v1/responses":
                body |= {"input": text, "max_output_tokens": max(16, tokens)}
            else:
                body |= {"messages": chat, "max_tokens": tokens}
                if "temperature" in body:
                    body["temperature"] = min(1.0, body["temperature"])
        yield Request(path, body)


def _prompt(rng: random.Random) -> str:
    """Return code, often with what was said before, so that prefixes are cached and an edit repeats its prompt."""
    parts = rng.choices(_CODE, k=rng.choice([1, 1, 2, 4, 12]))
    kind = rng.random()
    if kind < 0.4:
        return f"# original\n{''.join(parts)}\n# with another name\n"
    if kind < 0.5:
        return "".join(rng.choices("abcdefg \n(){}:=", k=rng.randint(1, 200)))
    return "".join(parts)


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Return parameters that all routes have: greedy for half of the requests."""
    found: dict[str, Any] = {}
    if rng.random() < 0.5:
        found["temperature"] = round(rng.uniform(0.2, 1.5), 2)
        if rng.random() < 0.5:
            found["seed"] = rng.randrange(1 << 63)
        if rng.random() < 0.3:
            found["top_k"] = rng.randint(1, 50)
        if rng.random() < 0.3:
            found["top_p"] = round(rng.uniform(0.3, 0.99), 2)
        if rng.random() < 0.1:
            found["typical_p"] = 0.9
    else:
        found["temperature"] = 0
    if rng.random() < 0.15:
        found["repetition_penalty"] = 1.15
    if rng.random() < 0.15:
        found |= {"presence_penalty": 0.5, "frequency_penalty": -0.25}
    if rng.random() < 0.1:
        found["logit_bias"] = {str(rng.randrange(4096)): 4.0, str(rng.randrange(4096)): -8.0}
    if rng.random() < 0.1:
        found["bad_words"] = ["self", "return x"]
    if rng.random() < 0.05:
        found["ignore_eos"] = True
    if rng.random() < 0.3:
        found["speculation"] = {"enabled": rng.random() < 0.5, "max_tokens": rng.randint(0, 9)}
    if rng.random() < 0.05:
        found["timeout_ms"] = rng.choice([40, 400, 60_000])
    return found


async def collect(port: int, count: int, streams: int, rng: random.Random) -> list[Any]:
    """Return receipts of replies under load.

    Args:
        port: of the service on this machine.
        count: receipts.
        streams: requests in progress.
        rng: decides the requests.

    Raises:
        SystemExit: a reply is an error, or has not exactly one receipt.
    """
    requests = random_requests(rng)
    found: list[Any] = []

    async def stream() -> None:
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 24)
        try:
            while len(found) < count:
                request = next(requests)
                writer.write(encode_post(*request))
                reply = await read_reply(reader)
                options = request.body.get("parameters", request.body)
                if reply.status in _LATE and options.get("timeout_ms"):
                    continue
                receipts = receipts_of(reply.body)
                if not receipts and "timeout_ms" in options and b"timeout" in reply.body.lower():
                    continue  # a stream that its deadline has ended
                if reply.status != _OK or len(receipts) != 1:
                    raise SystemExit(
                        f"{len(receipts)} receipts in the reply {reply.status} to {request}: {reply.body[:2000]!r}"
                    )
                found.extend(receipts)
        finally:
            writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())
    return found[:count]


def receipts_of(body: bytes) -> list[Any]:
    """Return the receipts in a reply or in the events of a stream."""
    lines = [it.removeprefix(b"data:").strip() for it in body.split(b"\n")]
    values = [json.loads(it) for it in lines if it.startswith((b"{", b"[{"))]
    found = []
    for value in values:
        reply = value[0] if isinstance(value, list) else value
        receipt = reply.get("receipt") or reply.get("response", {}).get("receipt")
        found += [] if receipt is None else [receipt]
    return found


def summary(receipts: list[Any]) -> dict[str, Any]:
    """Return what the receipts are of."""
    outputs = [
        output | {"sampling": receipt["sampling"] | output.get("sampling", {})}
        for receipt in receipts
        for output in receipt["outputs"]
    ]
    return {
        "receipts": len(receipts),
        "outputs": len(outputs),
        "tokens": sum(len(output["token_ids"]) for output in outputs),
        "sampled": sum(output["sampling"].get("temperature", 1.0) > 0 for output in outputs),
        "with_grammar": sum("grammar" in output["sampling"] for output in outputs),
        "with_logprobs": sum("logprobs" in output for output in outputs),
        "finish_reasons": dict(Counter(output["finish_reason"] for output in outputs)),
    }


def main() -> None:
    """Collect, replay, write the report, and exit with status 1 if something does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--receipts", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="options of both")
    add_bookkeeping(parser)
    options = parser.parse_args()
    service = ManagedService([f"--kv-cache-tokens={_CACHE_TOKENS}", *options.serve])
    try:
        service.start()
        service.wait_until_ready()
        began = time.monotonic()
        rng = random.Random(options.seed)
        receipts = asyncio.run(collect(service.port, options.receipts, options.streams, rng))
        served = time.monotonic() - began
        metrics = service.metrics()
        service.stop()
        file = Path(service.folder) / "receipts.jsonl"
        file.write_text("".join(json.dumps(it) + "\n" for it in receipts))
        began = time.monotonic()
        command = [sys.executable, "-m", "server.cli.main", "replay", str(file), "--quiet"]
        replay = subprocess.run(
            [*command, *options.serve], stdout=subprocess.PIPE, text=True, check=False
        )
    finally:
        service.close()
    row = {
        "streams": options.streams,
        "served_seconds": round(served, 1),
        "replayed_seconds": round(time.monotonic() - began, 1),
        "preemptions": metrics.get("tessera_preemptions_total"),
        "accepted_draft_tokens": metrics.get("tessera_draft_accepted_tokens_total"),
        **summary(receipts),
        "replay": replay.stdout.splitlines()[-20:],
        "holds": replay.returncode == 0,
    }
    write_report("receipts", [row], folder=options.out, revision=options.commit)
    raise SystemExit(replay.returncode)


if __name__ == "__main__":
    main()

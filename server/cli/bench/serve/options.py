"""The flags of `tessera bench serve`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from server.cli.bench.flags import add_result_flags
from server.cli.bench.serve.apis import APIS
from server.cli.bench.serve.metrics import Limits
from server.cli.bench.workload import Lengths
from server.cli.client.http_client import Target
from server.cli.parsing.values import checked, count, natural, positive

if TYPE_CHECKING:
    from server.cli.parsing.parser import Parser


def add_flags(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add(
        "--url",
        default="http://127.0.0.1:8000",
        type=checked(_url),
        help="of the server (%(default)s)",
    )
    add("--api", choices=list(APIS), default="tgi", help="tgi: POST /generate_stream, Tessera's own; "
        "openai: POST /v1/completions (%(default)s)")  # fmt: skip
    add("--model", help="name to ask an OpenAI-compatible server for; default: the first it lists")
    add("--header", action="append", default=[], type=checked(_header), metavar="NAME:VALUE",
        help="sent with every request, as for a password; may be repeated")  # fmt: skip
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", nargs="+", type=count, default=[1], metavar="N",
        help="requests in flight; several numbers are measured one after the other (1)")  # fmt: skip
    load.add_argument("--rate", type=positive, metavar="R",
        help="requests per second that arrive at random times instead")  # fmt: skip
    add("--burstiness", type=positive, default=1.0, metavar="B",
        help="of arrivals: 1 is a Poisson process, less comes in bursts (%(default)s)")  # fmt: skip
    add("--prompts", type=count, metavar="N",
        help="requests that count; default: 4 for each in flight, at least 16")  # fmt: skip
    add("--warm-up", type=natural, metavar="N",
        help="requests before, that do not count; default: one for each in flight, 8 with --rate")  # fmt: skip
    add("--input-len", type=checked(Lengths.parse), default=Lengths(256, 256), metavar="N|N-M",
        help="tokens of a prompt, a number or a uniform range (%(default)s)")  # fmt: skip
    add("--output-len", type=checked(Lengths.parse), default=Lengths(256, 256), metavar="N|N-M",
        help="tokens to generate, likewise (%(default)s)")  # fmt: skip
    add("--tokenizer", metavar="PATH", help="folder or Hugging Face id of the model's tokenizer, to make prompts of an "
        "exact length; default: the server's POST /tokenize")  # fmt: skip
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="ask for all of --output-len, whatever the model says")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    add("--seed", type=int, default=0, help="of lengths, arrivals and prompts (%(default)s)")
    add("--goodput", type=checked(Limits.parse), metavar="ttft:200,tpot:20,e2e:5000",
        help="also count the requests within these limits, in milliseconds")  # fmt: skip
    add("--processes", type=count, default=1, metavar="N",
        help="client processes that share the load (%(default)s)")  # fmt: skip
    add("--timeout", type=positive, default=600.0, help="seconds for one request (%(default)g)")
    add("--wait", type=float, default=0.0,
        help="seconds to wait for a server that is starting (%(default)g)")  # fmt: skip
    add_result_flags(parser, "what the server calls it")


def _url(text: str) -> str:
    Target.from_url(text)
    return text


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not (name + value).isprintable() or not text.isascii():
        raise ValueError("a header is NAME:VALUE in printable ASCII")
    return name.strip(), value.strip()

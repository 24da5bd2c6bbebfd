"""Answers a first word that is no command: the commands of other programs, and the names of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from model.errors import ModelFolderError
from model.hub.known_models import OLLAMA, REPOSITORIES, SEVERAL
from model.hub.names import read_name

if TYPE_CHECKING:
    from collections.abc import Container

WORDS: Final[dict[str, str]] = {
    "api": "`tessera serve` serves the API",
    "batch": "`tessera serve` computes requests together that are sent at the same time",
    "benchmark": "it is `tessera bench serve` or `tessera bench engine`",
    "cache": "`tessera list` shows the models in the cache, `tessera rm` deletes them",
    "check": "it is `tessera doctor`",
    "cli": "it is `tessera run MODEL`, or `tessera chat` for a service that runs",
    "client": "it is `tessera chat` or `tessera complete`",
    "completions": "it is `tessera complete`",
    "config": "`tessera serve --help` lists the settings",
    "convert": "there is no need: checkpoints are read as they are, in safetensors",
    "cp": "there is no copying; `tessera serve MODEL --served-model-name NAME` gives a model another name",
    "create": "there is no need: `tessera serve MODEL --chat-template FILE --served-model-name NAME` does what "
    "a Modelfile does",
    "delete": "it is `tessera rm MODEL`",
    "detokenize": "a service has POST /detokenize",
    "download": "it is `tessera pull MODEL`",
    "download-weights": "it is `tessera pull MODEL`",
    "embed": "Tessera generates text and computes no embeddings",
    "embedding": "Tessera generates text and computes no embeddings",
    "env": "it is `tessera doctor`",
    "estimate": "it is `tessera size`",
    "generate": "it is `tessera complete PROMPT` for a service that runs, or `tessera run MODEL PROMPT`",
    "get": "it is `tessera pull MODEL`",
    "info": "it is `tessera plan MODEL` for a model, and GET /info for a service that runs",
    "install": "it is `tessera pull MODEL`",
    "interactive": "it is `tessera run MODEL`",
    "launch": "it is `tessera serve MODEL`",
    "launcher": "it is `tessera serve MODEL`",
    "load": "it is `tessera serve MODEL`",
    "login": "the environment variable HF_TOKEN gives access to gated models of the Hugging Face Hub",
    "logs": "the service writes its log to standard error",
    "models": "it is `tessera list`",
    "push": "Tessera publishes no models",
    "quantize": "there is no need: `tessera serve MODEL --quantization` quantizes as it loads",
    "remove": "it is `tessera rm MODEL`",
    "rerank": "Tessera generates text and computes no ranks",
    "restart": "end the service with Ctrl-C or SIGTERM and start it again with `tessera serve`",
    "router": "it is `tessera serve MODEL --data-parallel N` for several GPUs of one machine",
    "run-batch": "`tessera serve` computes requests together that are sent at the same time",
    "search": "models are found at https://huggingface.co/models",
    "serve-model": "it is `tessera serve MODEL`",
    "server": "it is `tessera serve MODEL`",
    "shell": "it is `tessera run MODEL`",
    "show": "it is `tessera plan MODEL` for a model, and GET /info for a service that runs",
    "start": "it is `tessera serve MODEL`",
    "status": "it is `tessera ps`",
    "stop": "a service ends with Ctrl-C in its terminal, or with SIGTERM",
    "tokenize": "a service has POST /tokenize",
    "train": "Tessera trains no models",
    "tune": "Tessera trains no models",
    "uninstall": "it is `tessera rm MODEL`",
    "up": "it is `tessera serve MODEL`",
    "update": "`tessera pull MODEL` downloads the newest revision; pip updates Tessera",
    "upgrade": "`tessera pull MODEL` downloads the newest revision; pip updates Tessera",
    "warm-up": "it is `tessera warmup`",
    "web": "`tessera serve` has a page for browsers at /",
    "webui": "`tessera serve` has a page for browsers at /",
}
"""What to do instead of a command that other programs have, by its name in lower case."""


def answer(word: str, known: Container[str]) -> str | None:
    """Return an error message for the first word of a command line.

    Args:
        word: that is in the place of the command.
        known: names of the commands.

    Returns:
        The message; None if the word is a command, or nothing is known about it.
    """
    if word in known or word in ("-h", "--help"):
        return None
    if word.startswith("-"):
        flag = word.partition("=")[0]
        return f"{flag} is in the place of the command: `tessera serve {word} ...`, or `tessera --help`"
    if (name := word.lower().replace("_", "-")) in WORDS:
        return f"there is no command {word!r}: {WORDS[name]}"
    if name in known:
        return f"there is no command {word!r}: it is `tessera {name}`"
    return _answer_model(word)


def _answer_model(word: str) -> str | None:
    """Return the message for a word that is the name of a model, from its form or because it is well known."""
    folded = word.casefold()
    try:
        found = read_name(word)
    except ModelFolderError as error:
        has_form = (
            ":" in word or "/" in word or word.startswith(("~", ".")) or folded.endswith(".gguf")
        )
        if has_form or folded in SEVERAL or f"{folded}:latest" in OLLAMA:
            return f"{word!r} is not a command; `tessera serve MODEL` serves a model, but {error}"
        return None
    if found.repository is None or "/" in found.repository or folded in REPOSITORIES:
        return f"{word!r} is a model, not a command: `tessera serve {word}` serves it, `tessera run {word}` talks to it"
    return None

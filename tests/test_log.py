"""The log's two formats."""

import importlib
import json
import logging
import re
import sys

import pytest

from server.log import configure_logging, quoted, written_together


class Message:
    def __str__(self):
        return "name=value"

    def fields(self):
        return {"name": "value", "line": "a\nb", "number": 1.5}


@pytest.fixture(autouse=True)
def restore_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = True
    logging.logAsyncioTasks = True


@pytest.fixture
def written(capsys, restore_logging):
    def write(log_format, *calls):
        configure_logging("info", log_format)
        for level, message, arguments, error in calls:
            logging.getLogger("tessera.test").log(level, message, *arguments, exc_info=error)
        return capsys.readouterr().err

    return write


def an_error():
    try:
        raise ValueError("broken")
    except ValueError:
        return sys.exc_info()


def test_a_line_of_text_has_time_level_logger_and_message(written):
    text = written("text", (logging.WARNING, "%d of %d", (1, 2), None))

    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING tessera.test   1 of 2\n", text)


def test_an_exception_in_text_follows_its_line(written):
    text = written("text", (logging.ERROR, "it failed", (), an_error()))

    assert "it failed\nTraceback" in text
    assert text.endswith("ValueError: broken\n")


def test_every_line_of_json_is_an_object(written):
    text = written(
        "json",
        (logging.INFO, "two\nlines %s", ("ü",), None),
        (logging.ERROR, "it failed", (), an_error()),
        (logging.INFO, Message(), (), None),
        (logging.DEBUG, "not logged", (), None),
    )

    plain, failed, fields = [json.loads(line) for line in text.splitlines()]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", plain.pop("time"))
    assert plain == {"level": "info", "logger": "tessera.test", "message": "two\nlines ü"}
    assert "ValueError: broken" in failed["exception"]
    assert fields["name"] == "value"
    assert fields["line"] == "a\nb"
    assert "message" not in fields


def test_messages_of_a_block_are_written_together_at_its_end(monkeypatch):
    writes = []

    class Stream:
        def write(self, text):
            writes.append(text)

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stderr", Stream())
    configure_logging("info")
    log = logging.getLogger("tessera.test")
    with written_together():
        log.info("one")
        log.info("two")
        assert writes == []
    log.info("three")

    assert [re.sub(r"\d\d:\d\d:\d\d INFO    tessera.test   ", "", text) for text in writes[:1]] == [
        "one\ntwo\n"
    ]
    assert "".join(writes).count("\n") == 3


def test_a_message_of_fields_is_a_line_of_text(written):
    assert written("text", (logging.INFO, Message(), (), None)).endswith(" name=value\n")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/v1/completions", "/v1/completions"),
        ("a b", '"a b"'),
        ('say "x"', '"say \\"x\\""'),
        ("two\nlines", '"two\\nlines"'),
        ("a=b", '"a=b"'),
        ("\u2028", '"\\u2028"'),
        ("", '""'),
    ],
)
def test_a_value_from_outside_is_quoted_unless_it_is_plain(value, shown):
    assert quoted(value) == shown


def test_the_hubs_advice_to_log_in_is_not_logged_but_its_other_warnings_are(capsys):
    configure_logging("info", "text")
    replies = importlib.import_module("huggingface_hub.utils._http").logger

    replies.warning("You are sending unauthenticated requests to the HF Hub.")
    replies.warning("This repository has moved.")

    written = capsys.readouterr().err
    assert "unauthenticated" not in written
    assert "has moved" in written

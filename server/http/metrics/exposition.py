"""Renders metrics as text.

`prometheus_client` renders the text of a metric once. Afterwards a metric is rendered only if a sample has changed, and
then only its values. Otherwise a scrape of 1,200 samples would take 7 ms, in which the event loop sends no tokens; it
takes 0.12 ms, or 0.25 if many have changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from prometheus_client.metrics_core import Metric

    from server.http.metrics.rows import Reading, Samples

# Formats whose layouts are kept. Only a client that makes up versions of a format asks for more.
_MOST_FORMATS = 4
_MOST_TEXTS = 20_000
# From 0 up to this number, `floatToGoString` returns what `repr` does.
_EXPONENT_FROM = 1e6


class _Layout(NamedTuple):
    """The text of a metric with a placeholder for each value, and with the newest values.

    Attributes:
        shape: of the reading that it was made from.
        text: for the operator `%`.
        samples: the newest ones.
        filled: the encoded text with these.
    """

    shape: Hashable
    text: str
    samples: Samples
    filled: bytes


class _Format:
    """Owns the layouts of all metrics in one format.

    Args:
        encode: renders a registry of `prometheus_client`.
    """

    def __init__(self, encode: Callable[[Any], bytes]) -> None:
        self._encode = encode
        self._end = encode(_Families())
        self._layouts: dict[str, _Layout] = {}
        self._texts = _Texts()

    def render(self, readings: Sequence[Reading]) -> bytes:
        """Render metrics."""
        if len(self._texts) > _MOST_TEXTS:
            self._texts.clear()
        layouts, texts = self._layouts, []
        for reading in readings:
            name = reading.metric.name
            layout = layouts.get(name)
            if layout is None or layout.samples != reading.samples:
                layout = layouts[name] = self._fill(layout, reading)
            texts.append(layout.filled)
        texts.append(self._end)
        return b"".join(texts)

    def _fill(self, layout: _Layout | None, reading: Reading) -> _Layout:
        """Render a metric, with the layout of an earlier reading if its text differs in nothing but the values."""
        shape = reading.shape()
        numbers = tuple(map(self._texts.__getitem__, reading.values()))
        if layout is not None and layout.shape == shape:
            return _Layout(shape, layout.text, reading.samples, (layout.text % numbers).encode())
        filled = self._encode(_Families(reading)).removesuffix(self._end)
        return _Layout(shape, _lay_out(filled.decode(), numbers), reading.samples, filled)


class Exposition:
    """Owns the formats that were requested."""

    def __init__(self) -> None:
        self._formats: dict[str, _Format] = {}

    def render(self, readings: Sequence[Reading], accept: str) -> tuple[bytes, str]:
        """Render metrics in Prometheus' text format, or in another format that the client prefers.

        Args:
            readings: of all metrics. The common labels of a metric must be the same in all calls.
            accept: the request's `Accept` header.

        Returns:
            The text and its content type.
        """
        encode, content_type = choose_encoder(accept)
        if content_type not in self._formats:
            if len(self._formats) >= _MOST_FORMATS:
                self._formats.clear()
            self._formats[content_type] = _Format(encode)
        return self._formats[content_type].render(readings), content_type


class _Families:
    """The part of `prometheus_client`'s registry that its encoders use."""

    def __init__(self, *readings: Reading) -> None:
        self._readings = readings

    def collect(self) -> list[Metric]:
        """Return all metrics."""
        return [reading.family() for reading in self._readings]


class _Texts(dict[float, str]):
    """The texts of numbers: from one scrape to the next, few numbers change."""

    def __missing__(self, value: float) -> str:
        text = self[value] = _number(value)
        return text


def _number(value: float) -> str:
    if 0 <= value < _EXPONENT_FROM:
        return repr(float(value))
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call] # the library has no types
    return text


def _lay_out(text: str, numbers: tuple[str, ...]) -> str:
    """Put placeholders into a text whose lines end with these numbers, in this order."""
    lines = [
        line if not line or line.startswith("#") else line[: line.rindex(" ")] + " %s"
        for line in text.replace("%", "%%").split("\n")
    ]
    layout = "\n".join(lines)
    assert layout % numbers == text
    return layout

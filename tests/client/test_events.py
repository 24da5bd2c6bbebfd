"""Server-sent events in pieces that are split anywhere."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from server.client.events import EventReader

STREAM = (
    b"data: first\n\n: a comment\n\ndata:second\r\n\r\nevent: x\ndata: a\nid: 1\ndata: b\n\n"
    b'retry: 3\n\ndata:{"text":"\\n\\n data:"}\n\ndata:\n\ndata: cut'
)
EVENTS = [b"first", b"second", b"a\nb", b'{"text":"\\n\\n data:"}', b""]


def read(pieces):
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def test_events_have_data_and_comments_have_none():
    assert read([STREAM]) == EVENTS


def test_events_can_be_parsed_byte_by_byte():
    assert read([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_can_be_split_anywhere(cuts):
    ends = [0, *sorted(cuts), len(STREAM)]

    assert read([STREAM[a:b] for a, b in itertools.pairwise(ends)]) == EVENTS


def test_a_large_event_in_many_pieces_is_read_in_one_pass():
    # 64 MB in pieces of 4 KB: joining each with those before it would copy 500 GB.
    pieces = [b"data: ", *[b"x" * 4095 + b"\n"] * 16_000, b"\n"]

    assert [len(event) for event in read(pieces)] == [4095]

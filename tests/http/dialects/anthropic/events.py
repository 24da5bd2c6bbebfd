"""Reads the events of a stream of /v1/messages."""

import json


def events(response):
    """Return the JSON of every event of a stream; checks that its name is its type."""
    found = []
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    for frame in frames:
        name, data = frame.split("\n")
        one = json.loads(data.removeprefix("data: "))
        assert name == f"event: {one['type']}"
        found.append(one)
    return found


def replayed(found):
    """Return the message that the events of a stream describe, after checking their order."""
    found = [one for one in found if one["type"] != "ping"]
    assert found[0]["type"] == "message_start"
    assert [one["type"] for one in found[-2:]] == ["message_delta", "message_stop"]
    message = found[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    content, begun = message["content"], False
    for one in found[1:-2]:
        kind = one["type"].removeprefix("content_block_")
        assert begun is (kind != "start")
        if kind == "start":
            begun, text = True, ""
            content.append(one["content_block"])
        assert one["index"] == len(content) - 1
        block = content[-1]
        if kind == "delta":
            assert "" not in one["delta"].values()
            text += one["delta"].get("text", "") + one["delta"].get("partial_json", "")
        elif kind == "stop":
            begun = False
            assert text
            if block["type"] == "text":
                block["text"] = text
            else:
                assert block["input"] == {}
                block["input"] = json.loads(text)
    assert not begun
    return message | found[-2]["delta"] | {"usage": found[-2]["usage"]}

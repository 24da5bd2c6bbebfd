"""What the Engine view says about the service."""

import json

import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def facts(page):
    terms = page.locator("#facts > div")
    await terms.first.wait_for(state="attached")
    rows = await terms.evaluate_all(
        "(rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    return [tuple(row) for row in rows]


async def test_own_version_stands_above_that_of_the_api(visit):
    page = await (await visit()).open("#engine")
    info = await page.evaluate("fetch('info').then((response) => response.json())")

    shown = await facts(page)

    assert shown[:2] == [
        ("Tessera version", info["tessera_version"]),
        ("version of TGI's API", info["version"]),
    ]
    assert info["tessera_version"] != info["version"]
    assert not [row for row in shown if "[object" in "".join(row)]


async def test_facts_of_any_nesting_are_shown(visit):
    here = await visit()
    values = {
        "model_id": "a/b",
        "defaults": {
            "temperature": 0.000_25,
            "nested": {"deep": {"er": [1, 2, {"x": True}]}},
            "none": None,
        },
        "names": ["a", "b"],
        "empty": {},
        "no_names": [],
        "rows": [{"a_b": 1}, {"a_b": False}],
        "lists": [[1, 2], [3]],
    }

    async def answer(route):
        response = await route.fetch()
        await route.fulfill(response=response, body=json.dumps(await response.json() | values))

    await here.page.route("**/info", answer)
    page = await here.open("#engine")

    shown = await facts(page)

    for row in [
        ("defaults: temperature", "0.00025"),
        ("defaults: nested: deep: er: 1", "1"),
        ("defaults: nested: deep: er: 3: x", "yes"),
        ("names", "a, b"),
        ("empty", "none"),
        ("no names", "none"),
        ("rows: 1: a b", "1"),
        ("rows: 2: a b", "no"),
        ("lists: 1", "1, 2"),
        ("lists: 2", "3"),
    ]:
        assert row in shown
    assert not [row for row in shown if "[object" in "".join(row)]

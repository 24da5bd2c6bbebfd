"""The page in headless Chromium, served with a fake engine."""

import json

import pytest

from server.engine.core.messages import EngineStats
from server.engine.core.request import FinishReason
from server.engine.link.protocol import EngineState
from tests.http.fakes import EOS_ID, event, put, say, silent
from tests.http.page.conftest import answered, taken

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HELLO = [72, 105, 72, 105]
TOP = ((72, -0.5), (73, -1.5), (74, -3.5))
WIDE, NARROW = {"width": 1200, "height": 800}, {"width": 360, "height": 740}


async def generate(page):
    await page.locator("#prompt .primary").click()


async def finished(page):
    await page.locator("#prompt .primary:enabled").wait_for()


async def test_tokens_appear_as_they_stream_and_only_this_service_is_asked(
    visit, engine, tokenizer
):
    engine.script = say([*HELLO, EOS_ID], FinishReason.EOS, wait=0.3)
    here = await visit()
    page = await here.open()
    await page.fill("#prompt-text", "say: ")

    await generate(page)

    tokens = page.locator("#prompt .token")
    await tokens.nth(1).wait_for()
    assert await page.locator("#prompt .stop").is_enabled()
    await finished(page)
    assert await tokens.count() == 5
    text = tokenizer.decode(HELLO)
    assert await page.locator("#prompt .output").text_content() == f"say: {text}</s>"
    measures = await page.locator("#prompt .measures").inner_text()
    for part in ("eos_token", "first token", "tokens/s", "prompt tokens"):
        assert part in measures
    assert here.complaints == []
    assert here.requests
    assert all(url.startswith(here.url) for url in here.requests)


async def test_a_token_is_described_on_hover_and_on_focus(visit, engine):
    engine.script = say(HELLO, FinishReason.LENGTH, logprob=-1.5, top=TOP)
    here = await visit()
    page = await here.open()
    await generate(page)
    await finished(page)
    tip = page.locator("#token-details")

    await page.locator("#prompt .token").nth(2).hover()
    assert "log-probability \N{MINUS SIGN}1.500" in await tip.inner_text()
    assert await tip.locator("tr").count() == 3
    await page.mouse.move(0, 0)
    await tip.wait_for(state="hidden")

    await page.locator("#prompt .token").first.focus()
    await page.keyboard.press("ArrowRight")
    assert await page.evaluate("document.activeElement.dataset.index") == "1"
    assert await tip.is_visible()
    assert (
        await page.evaluate("document.activeElement.getAttribute('aria-describedby')")
        == "token-details"
    )
    await page.keyboard.press("Escape")
    assert await tip.is_hidden()
    assert await page.locator('#prompt .token[data-level="2"]').count() == 4
    assert here.complaints == []


@pytest.mark.parametrize("by", ["button", "key"])
async def test_stopping_aborts_the_request_in_the_engine(visit, engine, by):
    engine.script = silent
    here = await visit()
    page = await here.open()
    await generate(page)
    await page.locator("#prompt .stop:enabled").wait_for()
    await page.wait_for_timeout(200)

    if by == "button":
        await page.click("#prompt .stop")
    else:
        await page.keyboard.press("Escape")

    await finished(page)
    assert "stopped" in await page.locator("#prompt .measures").inner_text()
    await engine.abort_seen.wait()
    assert engine.running == set()
    assert await page.locator("#prompt .error").inner_text() == ""
    assert here.complaints == []


async def test_the_message_of_a_refused_request_is_shown(visit):
    here = await visit()
    page = await here.open()
    await page.fill("#prompt-text", "too long " * 100)

    await generate(page)

    error = page.locator("#prompt .error")
    await error.locator("small").wait_for()
    assert await error.get_attribute("role") == "alert"
    assert "`inputs`" in await error.inner_text()
    assert "status 422" in await error.inner_text()
    await page.fill("#prompt-text", "short")
    await generate(page)
    await finished(page)
    assert await error.inner_text() == ""


async def test_an_error_within_a_stream_is_shown_after_the_tokens(visit, engine):
    async def fail(_engine, _request, stream):
        put(stream, event(72))
        put(stream, event(None, FinishReason.ERROR, error="the step failed"))

    engine.script = fail
    here = await visit()
    page = await here.open()

    await generate(page)

    await page.locator("#prompt .error:not(:empty)").wait_for()
    assert "the step failed" in await page.locator("#prompt .error").inner_text()
    assert await page.locator("#prompt .token").count() == 1


async def test_a_server_that_is_gone_is_reported(visit):
    here = await visit()
    page = await here.open()
    await page.context.set_offline(True)

    await generate(page)

    await page.locator("#prompt .error:not(:empty)").wait_for()
    assert "cannot be reached" in await page.locator("#prompt .error").inner_text()
    await page.locator('#state[data-state="unreachable"]').wait_for()


async def test_the_settings_reach_the_engine(visit, engine):
    here = await visit()
    page = await here.open()
    values = {
        "#max-tokens": "7", "#temperature": "0.5", "#top-p": "0.9", "#top-k": "11", "#min-p": "0.1",
        "#repetition-penalty": "1.2", "#seed": "18446744073709551615", "#stop": "a\\nb\nc", "#alternatives": "2",
    }  # fmt: skip
    for control, value in values.items():
        await page.fill(control, value)

    await generate(page)
    await finished(page)

    assert await page.locator("#prompt .error").inner_text() == ""
    (request,) = engine.requests
    sampling = request.sampling
    assert sampling.max_new_tokens == 7
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 11)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (sampling.seed, sampling.top_logprobs) == (2**64 - 1, 2)
    assert "18446744073709551615" in await page.locator("#prompt .measures").inner_text()
    await page.locator("#prompt .request summary").click()
    command = await page.locator("#prompt .request pre", has_text="curl").inner_text()
    assert '"stop":["a\\nb","c"]' in command
    assert f"{here.url}generate_stream" in command
    assert here.complaints == []


async def test_settings_are_kept_until_the_defaults_are_restored(visit):
    here = await visit()
    page = await here.open()
    await page.fill("#top-k", "11")
    await page.uncheck("#marks")
    await page.reload()

    assert await page.input_value("#top-k") == "11"
    assert not await page.is_checked("#marks")
    assert await page.locator(".legend").is_hidden()
    await page.click("#settings button[type=reset]")
    assert await page.input_value("#top-k") == ""
    assert await page.is_checked("#marks")
    assert await page.locator(".legend").is_visible()


async def test_an_invalid_setting_is_pointed_out_and_nothing_is_sent(visit, engine):
    here = await visit()
    page = await here.open()
    await page.select_option("#grammar-kind", "json")
    await page.fill("#grammar", "{not json")

    await generate(page)

    assert await page.evaluate("document.activeElement.id") == "grammar"
    message = await page.evaluate("document.getElementById('grammar').validationMessage")
    assert message.startswith("Not JSON: ")
    assert engine.requests == []


async def test_the_colour_scheme_follows_the_system_until_one_is_chosen(visit):
    here = await visit(color_scheme="dark")
    page = await here.open()
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = await page.evaluate(ground)
    await page.emulate_media(color_scheme="light")
    light = await page.evaluate(ground)
    assert light != dark

    await page.click("#scheme")
    assert await page.evaluate(ground) == dark
    await page.reload()
    assert await page.evaluate(ground) == dark
    await page.click("#scheme")
    assert await page.evaluate(ground) == light
    await page.emulate_media(color_scheme="dark")
    assert await page.evaluate(ground) == dark


def guard(app):
    """Let only the page itself through without a key."""

    async def guarded(scope, receive, send):
        key = dict(scope["headers"]).get(b"authorization")
        if scope["path"] == "/" or scope["path"].startswith("/page/") or key == b"Bearer secret":
            return await app(scope, receive, send)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"27")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        return await send({"type": "http.response.body", "body": b'{"error":"invalid API key"}'})

    return guarded


async def test_a_key_unlocks_the_page_and_is_forgotten_with_the_tab(visit, engine):
    here = await visit(guard)
    page = here.page
    await page.goto(here.url)
    await page.fill("#max-tokens", "16")
    await page.locator('#state[data-state="locked"]').wait_for()
    await generate(page)
    await page.locator("#prompt .error:not(:empty)").wait_for()
    assert "invalid API key" in await page.locator("#prompt .error").inner_text()
    assert await page.evaluate("document.activeElement.id") == "api-key"

    await page.keyboard.type("secret")
    await page.keyboard.press("Tab")

    await page.locator('#state[data-state="ready"]').wait_for()
    await generate(page)
    await finished(page)
    assert await page.locator("#prompt .token").count() == 2
    assert len(engine.requests) == 1
    assert "secret" not in await page.evaluate("JSON.stringify(localStorage)")
    assert "secret" in await page.evaluate("JSON.stringify(sessionStorage)")
    await page.locator("#prompt .request summary").click()
    command = await page.locator("#prompt .request pre", has_text="curl").inner_text()
    assert "Authorization: Bearer $API_KEY" in command
    assert "secret" not in command


CHUNKS = (
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {
        "choices": [
            {
                "index": 0,
                "delta": {"content": "Good"},
                "logprobs": {
                    "content": [
                        {
                            "token": "Good",
                            "logprob": -0.1,
                            "bytes": None,
                            "top_logprobs": [
                                {"token": "Good", "logprob": -0.1, "bytes": None},
                                {"token": "Bad", "logprob": -2.5, "bytes": None},
                            ],
                        }
                    ]
                },
                "finish_reason": None,
            }
        ]
    },
    {"choices": [{"index": 0, "delta": {"content": " day"}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 8},
        },
    },
)  # fmt: skip


async def test_a_conversation_is_sent_and_shown_in_openais_format(visit):
    here = await visit()
    page = await here.open("#chat")
    bodies = []

    async def answer(route):
        bodies.append(json.loads(route.request.post_data))
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS) + "data: [DONE]\n\n"
        headers = {
            "content-type": "text/event-stream",
            "x-tessera-warnings": '["`min_p` has no effect"]',
        }
        await route.fulfill(status=200, headers=headers, body=text)

    await page.route("**/v1/chat/completions", answer)
    for text in ("Hello", "And now?"):
        await page.fill("#chat-text", text)
        await page.press("#chat-text", "Enter")
        await taken(page)
        await answered(page)

    assert [(m["role"], m["content"]) for m in bodies[1]["messages"]] == [
        ("user", "Hello"), ("assistant", "Good day"), ("user", "And now?"),
    ]  # fmt: skip
    assert bodies[0]["stream"] is True
    assert bodies[0]["logprobs"] is True
    answers = await page.locator("#chat-messages .assistant .output").all_inner_texts()
    assert answers == ["Good day", "Good day"]
    assert "`min_p` has no effect" in await page.locator("#chat .warnings").inner_text()
    assert "cached tokens" in await page.locator("#chat .accounting").text_content()
    assert "9" in await page.locator("#chat .measures").inner_text()
    await page.select_option("#chat-view", "tokens")
    await page.locator("#chat-messages .token").first.hover()
    assert "Bad" in await page.locator("#token-details").inner_text()
    await page.click("#conversations .new")
    await page.locator("#chat-empty").wait_for()
    assert await page.locator("#chat-messages li").count() == 0
    assert here.complaints == []


@pytest.mark.parametrize(
    ("status", "shown"),
    [(400, "the model has no chat template"), (404, "This server does not serve chat")],
)
async def test_a_server_without_chat_is_explained_and_the_message_kept(visit, status, shown):
    here = await visit()
    page = await here.open("#chat")
    body = {"error": {"message": "the model has no chat template", "code": status}}
    await page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=status, body=json.dumps(body))
    )
    await page.fill("#chat-text", "Hello")
    await page.press("#chat-text", "Enter")

    await page.locator("#chat .error:not(:empty)").wait_for()
    assert shown in await page.locator("#chat .error").inner_text()
    assert await page.input_value("#chat-text") == "Hello"
    assert await page.locator("#chat-messages li").count() == 0


async def test_the_state_of_the_engine_is_followed(visit, engine):
    engine.stats = EngineStats(
        num_blocks=64, kv_usage=0.25, num_running=3, num_waiting=2, generation_tokens=10
    )
    here = await visit()
    page = await here.open()

    assert await page.locator("#plot-running .value").inner_text() == "3"
    assert await page.locator("#plot-waiting .value").inner_text() == "2"
    assert await page.locator("#plot-kv .value").inner_text() == "25 %"
    await page.locator('#plot-throughput svg[aria-label*="now 0"]').wait_for()
    engine.state, engine.phase = EngineState.RESTARTING, "loading weights"
    await page.locator('#state[data-state="restarting"]').wait_for()
    assert "loading weights" in await page.locator("#state").inner_text()


async def test_a_hidden_page_does_not_poll(visit):
    here = await visit()
    await here.page.add_init_script(
        "window.away = false; Object.defineProperty(document, 'hidden', { get: () => window.away })"
    )
    page = await here.open()
    flip = "(away) => { window.away = away; document.dispatchEvent(new Event('visibilitychange')) }"
    await page.evaluate(flip, True)
    await page.wait_for_timeout(300)
    before = len(here.requests)

    await page.wait_for_timeout(1500)

    assert len(here.requests) == before
    async with page.expect_request("**/metrics"):
        await page.evaluate(flip, False)


async def test_the_plan_and_the_limits_are_shown(visit):
    here = await visit()
    page = await here.open()

    await page.keyboard.press("Tab")
    await page.locator("#tab-prompt").focus()
    await page.keyboard.press("ArrowRight")
    await page.keyboard.press("ArrowRight")

    await page.locator("#plan .phase").first.wait_for()
    assert "no head_dim 7" in await page.locator("#plan").inner_text()
    assert "fake/model" in await page.locator("#facts").inner_text()
    assert await page.locator("#settings-panel").is_hidden()
    assert here.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
async def test_axe_finds_no_violation_and_nothing_is_cut_off(visit, engine, scheme, size):
    pytest.importorskip("axe_playwright_python", reason="needs the package axe-playwright-python")
    from axe_playwright_python.async_playwright import Axe

    async def all_levels(_engine, _request, stream):
        for logprob in (-0.05, -0.5, -1.2, -2.5, -4.0):
            put(stream, event(72, None, logprob, TOP))
        put(stream, event(EOS_ID, FinishReason.EOS, -0.1, TOP))

    engine.script = all_levels
    here = await visit(viewport=size, color_scheme=scheme)
    page = await here.open()
    axe = Axe()

    async def check(state):
        found = await axe.run(page)
        assert found.violations_count == 0, f"{state}: {found.generate_report()}"
        assert await page.evaluate("document.documentElement.scrollWidth") <= size["width"], state

    await generate(page)
    await finished(page)
    assert await page.locator("#prompt .token").count() == 6
    await page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    await page.locator("#prompt .token").nth(4).focus()
    await check("tokens")
    await page.fill("#prompt-text", "too long " * 100)
    await generate(page)
    await page.locator("#prompt .error:not(:empty)").wait_for()
    await check("error")
    await page.click("#tab-chat")
    await page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=200,
            body="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in CHUNKS) + "data: [DONE]\n\n",
        ),
    )
    await page.fill("#chat-text", "Hello")
    await page.locator("#chat .primary").click()
    await taken(page)
    await answered(page)
    await check("chat")
    await page.click("#tab-engine")
    await page.locator("#plan .phase").first.wait_for()
    await check("engine")

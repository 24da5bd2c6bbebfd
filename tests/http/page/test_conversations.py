"""Conversations in headless Chromium: kept, listed, branched, exported, and within the model's context."""

import json

import pytest

from server.engine.core.request import FinishReason
from tests.http.fakes import EOS_ID, event, put, say
from tests.http.page.conftest import answered, taken
from tests.waiting import GIVE_UP

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
expect = pytest.importorskip("playwright.async_api", reason="needs the package playwright").expect
expect.set_options(timeout=GIVE_UP * 1000)

USERS = "#chat-messages .user .output"
REPLIES = "#chat-messages .assistant .output"


async def texts(page, selector):
    return [text.strip() for text in await page.locator(selector).all_inner_texts()]


def sent(request, tokenizer):
    """Return the conversation of a request to the engine, as the template rendered it."""
    return tokenizer.decode(list(request.prompt_token_ids))


def speak(tokenizer, text, finish=FinishReason.EOS):
    ids = tokenizer.encode(text, False)
    return say([*ids, EOS_ID] if finish is FinishReason.EOS else ids, finish, together=True)


async def test_the_page_opens_on_what_the_model_is_made_for_unless_the_address_names_a_view(
    open_chat, visit
):
    here = await open_chat()
    page = here.page
    assert await page.locator("#tab-chat").get_attribute("aria-selected") == "true"
    await page.goto(here.url + "#prompt")
    await page.reload()
    await page.locator('#state[data-state="ready"]').wait_for()
    await page.wait_for_timeout(300)
    assert await page.locator("#tab-prompt").get_attribute("aria-selected") == "true"

    plain = await visit()
    await plain.open()
    assert await plain.page.locator("#tab-prompt").get_attribute("aria-selected") == "true"
    assert "load_config" in await plain.page.input_value("#prompt-text")
    # Of code without a fence, Markdown would lose the indentation.
    await plain.page.locator("body[data-form=source]").wait_for()
    assert await plain.page.input_value("#chat-view") == "source"
    assert here.complaints == plain.complaints == []


async def test_a_conversation_is_the_same_after_a_reload(open_chat, engine, tokenizer, send):
    engine.script = speak(tokenizer, "Good **day**")
    here = await open_chat()
    page = here.page
    await send(page, "Hello there")
    await send(page, "And now?")
    assert "#chat/" in page.url

    await page.reload()

    await page.locator("#chat-messages > li").nth(3).wait_for()
    await page.locator("#chat-messages strong").nth(1).wait_for()
    assert await texts(page, USERS) == ["Hello there", "And now?"]
    assert await texts(page, REPLIES) == ["Good day", "Good day"]
    assert await page.locator("#conversations .open .title").all_inner_texts() == ["Hello there"]
    assert await page.inner_text("#chat-title") == "Hello there"
    await send(page, "Again")
    assert sent(engine.requests[-1], tokenizer).count("Good **day**") == 2
    assert here.complaints == []
    assert all(url.startswith(here.url) for url in here.requests)


async def test_a_reply_that_was_cut_off_keeps_what_it_had_and_is_continued(
    open_chat, engine, tokenizer, send
):
    async def begin(_engine, _request, stream):
        for token_id in tokenizer.encode("Once upon", False):
            put(stream, event(token_id))

    engine.script = begin
    here = await open_chat()
    page = here.page
    await page.fill("#chat-text", "Tell a story")
    await page.press("#chat-text", "Enter")
    await page.locator(REPLIES, has_text="Once upon").wait_for()
    await page.wait_for_timeout(600)
    url, context = page.url, page.context

    await page.close()  # as a crash: no handler of the page runs
    page = await context.new_page()
    await page.goto(url)

    await page.locator("#chat-messages [aria-label='Continue this reply']").wait_for()
    assert await texts(page, REPLIES) == ["Once upon"]
    engine.script = speak(tokenizer, " a time")
    await page.click("#chat-messages [aria-label='Continue this reply']")
    await page.locator(REPLIES, has_text="Once upon a time").wait_for()
    await answered(page)
    assert sent(engine.requests[-1], tokenizer).endswith("assistant\nOnce upon")
    await page.reload()
    await page.locator(REPLIES, has_text="Once upon a time").wait_for()

    engine.script = begin
    await page.fill("#chat-text", "Another")
    await page.press("#chat-text", "Enter")
    await page.locator(REPLIES, has_text="Once upon").nth(1).wait_for()
    await page.reload()  # before the text is due to be saved
    await page.locator("#chat-messages .note", has_text="The page was left").wait_for()
    assert (await texts(page, REPLIES))[1] == "Once upon"


async def test_a_reply_has_no_maximum_and_goes_on_after_one_was_reached(
    open_chat, engine, tokenizer, send
):
    engine.script = speak(tokenizer, "One, two", FinishReason.LENGTH)
    here = await open_chat()
    page = here.page
    await send(page, "Count")

    assert engine.requests[0].sampling.max_new_tokens > 1900
    assert "maximum length" in await page.inner_text("#chat-messages .note:not(:empty)")
    engine.script = speak(tokenizer, ", three")
    await page.click("[aria-label='Continue this reply']")
    await page.locator(REPLIES, has_text="One, two, three").wait_for()
    await answered(page)
    assert await page.locator("[aria-label='Continue this reply']").count() == 0
    assert here.complaints == []


async def test_edited_messages_and_other_replies_are_branches(open_chat, engine, tokenizer, send):
    engine.script = speak(tokenizer, "First")
    here = await open_chat()
    page = here.page
    await send(page, "One")
    await send(page, "Two")

    engine.script = speak(tokenizer, "Second")
    await page.locator("[aria-label='Edit this message']").first.click()
    assert await page.input_value("#chat-text") == "One"
    await send(page, "One, edited")
    assert await texts(page, USERS) == ["One, edited"]
    assert "2 / 2" in await page.inner_text(".branches")
    await page.click("[aria-label='Branch before']")
    await page.locator(USERS, has_text="Two").wait_for()
    assert await texts(page, USERS) == ["One", "Two"]

    engine.script = speak(tokenizer, "Third")
    await page.locator("[aria-label='Regenerate this reply']").last.click()
    await page.locator(REPLIES, has_text="Third").wait_for()
    await answered(page)
    assert await texts(page, REPLIES) == ["First", "Third"]
    await page.reload()
    await page.locator(REPLIES, has_text="Third").wait_for()
    await page.locator("[aria-label='Branch before']").last.click()
    await page.locator("#chat-messages > li:last-child", has_text="First").wait_for()
    assert here.complaints == []


async def test_conversations_are_searched_renamed_and_deleted_with_undo(
    open_chat, engine, tokenizer, send
):
    engine.script = speak(tokenizer, "A walrus is a mammal")
    here = await open_chat()
    page = here.page
    titles = page.locator("#conversations .title")
    await send(page, "Animals")
    await page.click("#conversations .new")
    engine.script = speak(tokenizer, "Granite")
    await send(page, "Stones")
    await expect(titles).to_have_text(["Stones", "Animals"])

    for words, found in (("WALRUS mammal", ["Animals"]), ("stone", ["Stones"]), ("zebra", [])):
        await page.fill("#conversations-search", words)
        await expect(titles).to_have_text(found)
    assert "Nothing found" in await page.inner_text("#conversations .empty")
    await page.fill("#conversations-search", "")
    await titles.nth(1).wait_for()

    await page.click("[aria-label='Rename Animals']")
    await page.keyboard.type("Beasts")
    await page.keyboard.press("Enter")
    await titles.filter(has_text="Beasts").wait_for()
    await page.click("[aria-label='Delete Beasts']")
    await page.locator("#chat-notice", has_text="Deleted: Beasts").wait_for()
    await expect(titles).to_have_text(["Stones"])
    await page.click("#chat-notice button:has-text('Undo')")
    await page.locator(USERS, has_text="Animals").wait_for()
    assert await page.inner_text("#chat-title") == "Beasts"
    assert here.complaints == []


OPENAI = [
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "The weather"},
            {"type": "text", "text": "in <b>Bonn</b>"},
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"place": "Bonn", "__proto__": 1}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "18 degrees"},
]


async def test_exported_conversations_are_imported_as_they_were(
    open_chat, engine, tokenizer, send, tmp_path
):
    engine.script = speak(tokenizer, "Good day")
    here = await open_chat()
    page = here.page
    await send(page, "Hello / there")
    await page.click("[aria-label='Regenerate this reply']")
    await page.locator(".branches").wait_for()
    await answered(page)

    async with page.expect_download() as waiting:
        await page.click("#chat .menu summary")
        await page.click("#chat-markdown")
    markdown = await waiting.value
    assert markdown.suggested_filename == "Hello-there.md"
    await markdown.save_as(tmp_path / "one.md")
    text = (tmp_path / "one.md").read_text()
    assert text == "# Hello / there\n\n## You\n\nHello / there\n\n## Model\n\nGood day\n"
    async with page.expect_download() as waiting:
        await page.click("#conversations .export-all")
    file = tmp_path / "all.json"
    await (await waiting.value).save_as(file)
    exported = json.loads(file.read_text())
    assert [len(one["messages"]) for one in exported["conversations"]] == [3]

    await page.set_input_files("#conversations-file", file)
    await page.locator("#conversations .title").nth(1).wait_for()
    assert await texts(page, REPLIES) == ["Good day"]
    assert await page.locator(".branches").count() == 1
    exported["conversations"][0]["messages"][1]["role"] = "robot"
    file.write_text(json.dumps(exported))
    await page.set_input_files("#conversations-file", file)
    notice = page.locator("#chat-notice", has_text="was not imported")
    await notice.wait_for()
    assert "conversations[0].messages[1].role must be" in await notice.inner_text()
    assert '"robot"' in await notice.inner_text()
    assert await page.locator("#conversations .title").count() == 2
    await page.click("#chat-notice [aria-label=Dismiss]")
    assert await page.evaluate("document.activeElement.id") == "chat-text"

    circle = exported | {"conversations": [{"messages": [{"id": "a", "parent": "a"}]}]}
    file.write_text(json.dumps(circle))
    await page.set_input_files("#conversations-file", file)
    await page.locator("#chat-notice", has_text="messages[0].parent must be").wait_for()
    file.write_text(json.dumps({"messages": OPENAI}))
    await page.set_input_files("#conversations-file", file)
    await page.locator("#chat-messages > .tool", has_text="18 degrees").wait_for()
    assert await texts(page, USERS) == ["The weather\nin <b>Bonn</b>"]
    assert "place" in await page.inner_text("#chat-messages .assistant .calls")
    assert here.complaints == []


async def test_two_tabs_show_each_others_messages_and_lose_none(open_chat, engine, tokenizer, send):
    engine.script = speak(tokenizer, "Good day")
    here = await open_chat()
    one = here.page
    await send(one, "From one")
    two = await one.context.new_page()
    await two.goto(one.url)
    await two.locator(USERS, has_text="From one").wait_for()

    await send(two, "From two")
    await one.locator(USERS, has_text="From two").wait_for()
    await one.locator(REPLIES).nth(1).wait_for()
    await one.wait_for_timeout(300)
    await send(one, "From one again")
    await two.locator(USERS, has_text="From one again").wait_for()

    await two.reload()
    await two.locator(USERS).nth(2).wait_for()
    assert await texts(two, USERS) == ["From one", "From two", "From one again"]
    await two.click("[aria-label='Delete From one']")
    await one.locator("#chat-notice", has_text="deleted in another tab").wait_for()
    assert await one.locator("#chat-messages > li").count() == 0
    assert here.complaints == []


# As Firefox does where cookies are blocked.
BLOCKED = """for (const name of ['indexedDB', 'localStorage', 'sessionStorage', 'BroadcastChannel'])
  Object.defineProperty(window, name, { get: () => { throw new DOMException('no', 'SecurityError') } })"""
FULL = (
    "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError') }"
)


@pytest.mark.parametrize(
    ("broken", "said"), [(BLOCKED, "SecurityError"), (FULL, "full")], ids=["blocked", "full"]
)
async def test_without_storage_the_chat_works_until_the_page_is_left_and_says_so_once(
    open_chat, engine, tokenizer, send, broken, said
):
    engine.script = speak(tokenizer, "Good day")
    here = await open_chat(init=broken)
    page = here.page
    await send(page, "Hello")
    notice = page.locator("#chat-notice", has_text=said)
    await notice.wait_for()
    await page.click("#chat-notice [aria-label=Dismiss]")
    await page.click("#conversations .new")
    await send(page, "Another")

    await page.click("#conversations .title >> text=Hello")

    await page.locator(USERS, has_text="Hello").wait_for()
    assert await texts(page, REPLIES) == ["Good day"]
    assert await page.inner_text("#chat-notice") == ""
    assert here.complaints == []


async def test_a_full_context_is_said_before_sending_and_old_turns_are_left_out(
    open_chat, engine, tokenizer, send
):
    engine.script = speak(tokenizer, "Good day to you")
    here = await open_chat(context_tokens=200)
    page = here.page
    await send(page, "a" * 60)
    await page.locator("#chat-context .text", has_text="of 200 tokens").wait_for()
    assert int(await page.get_attribute("#chat-context", "aria-valuenow")) > 60
    await page.fill("#chat-text", "b" * 70)
    await page.press("#chat-text", "Enter")

    await page.locator("#chat-full button").first.wait_for()
    assert "The context is full" in await page.inner_text("#chat-full")
    assert len(engine.requests) == 1
    assert await page.input_value("#chat-text") == "b" * 70
    await page.click("#full-leave-out")
    await taken(page)
    await answered(page)
    await page.locator("#chat-messages .divider").wait_for()
    assert "a" * 60 not in sent(engine.requests[1], tokenizer)
    assert await page.locator("#chat-messages .left-out").count() == 2

    await page.fill("#chat-text", "c" * 70)
    await page.press("#chat-text", "Enter")
    await page.click("#full-begin")
    await page.locator(USERS, has_text="c" * 70).wait_for()
    await answered(page)
    assert await texts(page, USERS) == ["c" * 70]
    assert await page.locator("#conversations .title").count() == 2
    await page.fill("#chat-text", "d" * 300)
    await page.press("#chat-text", "Enter")
    await page.locator("#chat-full", has_text="does not fit even alone").wait_for()
    await page.keyboard.press("Escape")
    assert await page.evaluate("document.activeElement.id") == "chat-text"
    assert here.complaints == []


async def test_text_files_are_sent_with_the_message_and_others_are_refused_by_name(
    open_chat, engine, tokenizer, send
):
    engine.script = speak(tokenizer, "Seen")
    here = await open_chat()
    page = here.page
    await page.set_input_files(
        "#chat-file",
        [
            {"name": "\u202ea.py", "mimeType": "text/x-python", "buffer": b"print('```')\n"},
            {"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x00\xff"},
            {"name": "big.txt", "mimeType": "text/plain", "buffer": b"x" * 600_000},
            {"name": "b.txt", "mimeType": "text/plain", "buffer": "Grüße".encode()},
        ],
    )
    await page.locator("#chat-form .chip").nth(1).wait_for()
    notice = await page.inner_text("#chat-notice")
    assert "photo.png is not a text file" in notice
    assert "big.txt has 586 KiB; a file may have at most 512 KiB" in notice
    await page.locator("#chat-form .chip").first.click()
    assert "print('```')" in await page.inner_text("#file-view pre")
    await page.keyboard.press("Escape")
    await page.click("[aria-label='Remove b.txt']")

    await send(page, "What is it?")

    prompt = sent(engine.requests[0], tokenizer)
    assert "`a.py`:\n\n````py\nprint('```')\n````\n\nWhat is it?" in prompt
    await page.reload()
    await page.locator("#chat-messages .chip", has_text="a.py").wait_for()
    assert await texts(page, USERS) == ["What is it?"]
    assert here.complaints == []


async def test_settings_belong_to_their_conversation_and_presets_are_kept(
    open_chat, engine, tokenizer, send
):
    engine.script = speak(tokenizer, "Good day")
    here = await open_chat(served_model_name=("small", "large"))
    page = here.page
    await page.click("#settings-toggle")
    await page.fill("#chat-system", "Be brief.")
    await page.fill("#top-k", "11")
    await page.select_option("#chat-model", "large")
    await page.fill("#preset-name", "Terse")
    await page.click("#preset-save")
    await send(page, "Hello")
    assert sent(engine.requests[0], tokenizer).startswith("<|im_start|>system\nBe brief.")
    assert engine.requests[0].sampling.top_k == 11
    assert "large" in await page.inner_text("#chat-messages .assistant h3")

    await page.click("#conversations .new")
    assert await page.input_value("#chat-system") == ""
    await page.fill("#top-k", "7")
    await page.click("#conversations .title >> text=Hello")
    await page.locator("#chat-messages > li").nth(1).wait_for()
    assert await page.input_value("#top-k") == "11"
    assert await page.input_value("#chat-system") == "Be brief."
    await page.click("#tab-prompt")
    assert await page.input_value("#top-k") == ""
    assert await page.input_value("#max-tokens") == "128"

    await page.goto(here.url)
    await page.reload()
    await page.locator('[data-view="chat"] #state[data-state="ready"]').wait_for()
    await page.locator("#model-field").wait_for(state="attached")
    await page.click("#settings-toggle")
    assert await page.input_value("#top-k") == "7"
    await page.select_option("#preset", "Terse")
    assert await page.input_value("#top-k") == "11"
    assert await page.input_value("#chat-system") == "Be brief."
    await page.click("#preset-delete")
    assert await page.locator("#preset option").count() == 1
    assert here.complaints == []


FILL = """async (count) => {
  const { Store } = await import('./page/chat/store.js');
  const { newConversation, newMessage } = await import('./page/chat/tree.js');
  const store = new Store(() => {}, () => {});
  const conversation = { ...newConversation(), title: 'Long' };
  const text = 'A **paragraph** of text.\\n\\n```python\\nprint(1)\\n```\\n'.repeat(4);
  const messages = [];
  for (let i = 0; i < count; i += 1) {
    const role = i % 2 ? 'assistant' : 'user';
    messages.push(newMessage(conversation, messages.at(-1), { role, content: text }));
  }
  await store.save({ ...conversation, head: messages.at(-1).id }, {}, messages);
  return conversation.id;
}"""


async def test_a_long_conversation_opens_at_its_end_and_renders_what_is_near(open_chat):
    here = await open_chat(options={"viewport": {"width": 360, "height": 640}})
    page = here.page
    conversation = await page.evaluate(FILL, 200)
    await page.goto(f"{here.url}#chat/{conversation}")

    await page.locator("#chat-messages > li:last-child .code-block").first.wait_for()

    assert await page.locator("#chat-messages > li").count() == 200
    assert await page.locator("#chat-messages .waiting").count() > 150
    await page.wait_for_timeout(500)
    rest = "(one) => one.scrollHeight - one.scrollTop - one.clientHeight"
    assert await page.locator("#chat-scroller").evaluate(rest) < 50
    assert await page.locator("#chat-end").is_hidden()
    box = await page.locator("#chat-form").bounding_box()
    assert box["y"] + box["height"] <= 640
    await page.hover("#chat-scroller")
    await page.mouse.wheel(0, -3000)
    await page.locator("#chat-end").wait_for()
    await page.click("#chat-end")
    await page.locator("#chat-end").wait_for(state="hidden")
    assert here.complaints == []


DAMAGE = """async (records) => {
  const { Store } = await import('./page/chat/store.js');
  const store = new Store(() => {}, () => {});
  await store.opening;
  const transaction = store.database.transaction(['conversations', 'messages'], 'readwrite');
  for (const [name, record] of records) transaction.objectStore(name).put(record);
  await new Promise((resolve) => (transaction.oncomplete = resolve));
}"""


async def test_damaged_records_do_not_stop_the_chat(open_chat, engine, tokenizer, send):
    engine.script = speak(tokenizer, "Good day")
    here = await open_chat()
    page = here.page
    circle = [{"id": str(i), "parent": str((i + 1) % 3), "content": "round"} for i in range(3)]
    odd = {"content": {"a": 1}, "role": "robot", "files": "none", "toolCalls": 5, "usage": "x"}
    records = [
        ["conversations", {"id": "circle", "title": "Circle", "head": "0"}],
        *[["messages", {"conversation": "circle", "role": "user", **one}] for one in circle],
        ["conversations", {"id": "odd", "title": 7, "settings": [], "head": {}, "updated": "x"}],
        ["messages", {"id": "odd", "conversation": "odd", **odd}],
        ["conversations", {"id": "bare"}],
        ["messages", {"id": "bare", "conversation": "bare"}],
    ]
    await page.evaluate(DAMAGE, records)

    for name, number in (("circle", 3), ("odd", 1), ("bare", 1)):
        await page.goto(f"{here.url}#chat/{name}")
        await page.locator("#chat-messages > li").nth(number - 1).wait_for()
        await send(page, "Hello")
        assert await page.locator("#chat-messages > li").count() == number + 2, name
    await page.fill("#conversations-search", "round")
    await page.locator("#conversations .title", has_text="Circle").wait_for()
    await page.wait_for_timeout(300)
    assert await page.locator("#conversations .title").all_inner_texts() == ["Circle"]
    assert here.complaints == []


async def test_keys_reach_the_chat(open_chat, engine, tokenizer, send):
    engine.script = speak(tokenizer, "Good day")
    here = await open_chat()
    page = here.page
    await send(page, "Hello")
    await page.keyboard.press("ArrowUp")
    assert await page.input_value("#chat-text") == "Hello"
    await page.keyboard.press("Escape")
    assert await page.input_value("#chat-text") == ""
    await page.keyboard.press("Control+k")
    assert await page.evaluate("document.activeElement.id") == "conversations-search"
    await page.keyboard.press("Alt+n")
    await page.locator("#chat-empty").wait_for()
    assert await page.evaluate("document.activeElement.id") == "chat-text"
    await page.focus("#chat-scroller")
    await page.keyboard.press("?")
    assert await page.locator("#keys").is_visible()
    await page.keyboard.press("Escape")
    await page.keyboard.press("/")
    assert await page.evaluate("document.activeElement.id") == "chat-text"
    assert here.complaints == []


@pytest.mark.parametrize(
    ("width", "scheme"), [(1200, "light"), (360, "dark")], ids=["wide", "narrow"]
)
async def test_axe_finds_no_violation_in_the_chat(
    open_chat, engine, tokenizer, send, width, scheme
):
    pytest.importorskip("axe_playwright_python", reason="needs the package axe-playwright-python")
    from axe_playwright_python.async_playwright import Axe

    engine.script = speak(tokenizer, "Good **day**", FinishReason.LENGTH)
    options = {"viewport": {"width": width, "height": 740}, "color_scheme": scheme}
    here = await open_chat(context_tokens=300, options=options, served_model_name=("a", "b"))
    page, axe = here.page, Axe()

    async def check(state):
        found = await axe.run(page)
        assert found.violations_count == 0, f"{state}: {found.generate_report()}"
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, state

    await check("empty")
    await page.set_input_files(
        "#chat-file", [{"name": "a.py", "mimeType": "text/plain", "buffer": b"print(1)"}]
    )
    await send(page, "Hello")
    await page.locator("[aria-label='Regenerate this reply']").click()
    await page.locator(".branches").wait_for()
    await answered(page)
    await page.locator("[aria-label='Edit this message']").click()
    await page.click("#chat .menu summary")
    await check("branches, editing and menu")
    await page.keyboard.press("Escape")
    await page.locator("#chat-messages .chip").click()
    await check("file")
    await page.keyboard.press("Escape")
    await page.fill("#chat-text", "x" * 400)
    await page.press("#chat-text", "Enter")
    await page.locator("#chat-full button").first.wait_for()
    await check("full")
    await page.click("#full-back")
    await page.click("#settings-toggle")
    await check("settings")
    await page.keyboard.press("Escape")
    await page.click("#settings-close" if width < 992 else "#settings-toggle")
    if width < 992:
        await page.click("#conversations-toggle")
        await check("list")
    else:
        await page.click("#conversations [aria-label^=Delete]")
        await page.locator("#chat-notice button").first.wait_for()
        await check("notice")

"""Opens the page of a service in headless Chromium."""

import contextlib
import shutil

import msgspec
import pytest

from model.text.chat_template import ChatTemplate
from tests.http.fakes import INFO
from tests.http.page.messages import Messages
from tests.http.serving import Server
from tests.waiting import GIVE_UP

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Visit:
    """The page in one browser context, with what the browser complained about and whom it asked."""

    def __init__(self, page, url):
        self.page = page
        self.url = url
        self.complaints = []
        self.requests = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def _note(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    async def open(self, view=""):
        await self.page.goto(self.url + view)
        await self.page.locator('#state[data-state="ready"]').wait_for()
        # The fake engine's context has 128 tokens.
        await self.page.evaluate("document.getElementById('max-tokens').value = 16")
        return self.page


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def browser(anyio_backend):
    playwright = pytest.importorskip("playwright.async_api", reason="needs the package playwright")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs Chromium: none of {', '.join(NAMES)} is installed")
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=path)
        yield browser
        await browser.close()


@pytest.fixture
async def serve(make_app):
    """Serves the application with the fake engine on a port; returns its address."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(wrap=lambda app: app):
            server = await stack.enter_async_context(Server(wrap(make_app()), "httptools"))
            return f"http://127.0.0.1:{server.port}/"

        yield start


@pytest.fixture
async def visit(browser, serve):
    """Makes a visit in a new browser context with the given options."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(wrap=lambda app: app, **options):
            context = await browser.new_context(**options)
            stack.push_async_callback(context.close)
            context.set_default_timeout(GIVE_UP * 1000)
            return Visit(await context.new_page(), await serve(wrap))

        yield start


@pytest.fixture
async def messages(visit):
    """A page that shows single messages, in the real page's policy."""
    return await Messages(await visit()).open()


@pytest.fixture
async def open_chat(browser, make_app, engine, tokenizer):
    """Opens the page of a service that is made for chat, in a new browser context; returns the `Visit`."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*, context_tokens=2048, init="", options=None, **limits):
            engine.info = msgspec.structs.replace(INFO, max_total_tokens=context_tokens)
            app = make_app(chat_template=ChatTemplate({"default": TEMPLATE}, tokenizer), **limits)
            server = await stack.enter_async_context(Server(app, "httptools"))
            context = await browser.new_context(accept_downloads=True, **(options or {}))
            stack.push_async_callback(context.close)
            context.set_default_timeout(GIVE_UP * 1000)
            if init:
                await context.add_init_script(init)
            here = Visit(await context.new_page(), f"http://127.0.0.1:{server.port}/")
            await here.page.goto(here.url)
            await here.page.locator('[data-view="chat"] #state[data-state="ready"]').wait_for()
            return here

        yield start


@pytest.fixture
def send():
    """Sends a message in the chat and waits for the end of the reply."""

    async def send_one(page, text):
        await page.fill("#chat-text", text)
        await page.press("#chat-text", "Enter")
        await taken(page)
        await answered(page)

    return send_one


async def taken(page):
    """Wait until the message is sent: the box is empty, and the request runs."""
    for _ in range(400):
        if await page.input_value("#chat-text") == "":
            return
        await page.wait_for_timeout(50)
    raise AssertionError(await page.inner_text("#chat .dock"))


async def answered(page):
    """Wait until no reply streams, and what there is of it is written."""
    await page.locator("#chat-form .primary:enabled").wait_for()
    await page.locator("#chat-messages > li:last-child .tools button:enabled").first.wait_for()

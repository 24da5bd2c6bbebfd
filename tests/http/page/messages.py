"""A page of this service with nothing but messages, for tests of how they are shown."""

import json

# The headers of the real page stay, and with them its content security policy.
DOCUMENT = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8"><title>Messages</title>
  <link rel="icon" href="page/icon.svg">
  <link rel="stylesheet" href="page/style.css"><link rel="stylesheet" href="page/message.css">
</head>
<body><main><h1>Messages</h1><h2>Conversation</h2><h3>Model</h3><div id="list"></div></main>
<div id="token-details" role="tooltip" hidden></div></body>
</html>"""
HELPERS = """async () => {
  const { MessageView } = await import("/page/message_view.js");
  const { libraries, load } = await import("/page/message/libraries.js");
  const list = document.getElementById("list");
  const make = () => {
    const node = document.createElement("div");
    list.replaceChildren(node);
    return new MessageView(node);
  };
  // Not a global variable, so that tests can look for those that messages make.
  document.helpers = { make, libraries };
  const ready = () => libraries.MarkdownIt && libraries.lowlight;
  document.ready = new Promise((resolve) => {
    const again = () => (ready() ? resolve() : load(again));
    document.begin = again;
  });
}"""


class Messages:
    """The page; `view` in scripts of `run` is the view of the message that was shown last."""

    def __init__(self, visit):
        self.visit = visit
        self.page = visit.page

    async def open(self, *, libraries=True):
        async def serve(route):
            response = await route.fetch(headers={"accept": "text/html"})
            await route.fulfill(response=response, body=DOCUMENT)

        await self.page.route(self.visit.url, serve)
        await self.page.goto(self.visit.url)
        await self.page.evaluate(HELPERS)
        if libraries:
            await self.page.evaluate("document.begin(), document.ready")
        return self

    async def show(self, content="", **fields):
        """Show a complete message; without a role, one of the model."""
        message = {"role": "assistant", "content": content} | fields
        script = (
            "(message) => { document.view = document.helpers.make(); document.view.show(message); }"
        )
        await self.page.evaluate(script, message)

    async def stream(self, *parts, flush=False):
        """Show parts of a stream, each painted before the next one; a part is a text or a record."""
        made = [{"text": part} if isinstance(part, str) else {"text": ""} | part for part in parts]
        rest = {"logprob": None, "special": False, "alternatives": [], "name": ""}
        script = """async ([parts, flush]) => {
          const view = (document.view = document.helpers.make());
          for (const part of parts) {
            const painted = new Promise((resolve) => (view.onflush = resolve));
            view.append(part);
            await painted;
          }
          view.onflush = () => {};
          if (flush) view.flush();
        }"""
        await self.page.evaluate(script, [[rest | part for part in made], flush])

    async def run(self, script, argument=None):
        """Evaluate an expression or function; `view` and `list` are the message's view and element."""
        prelude = "const view = document.view, list = document.getElementById('list');"
        return await self.page.evaluate(
            f"(argument) => {{ {prelude} return ({script}); }}", argument
        )

    async def text(self, selector="#list"):
        return await self.page.locator(selector).inner_text()

    async def count(self, selector):
        return await self.page.locator(f"#list {selector}").count()


def call(index, **fields):
    """A part of a stream with a piece of a tool's call."""
    return {"toolCall": {"index": index} | fields}


def pretty(value):
    return json.dumps(value, indent=2)

"""Takes the pictures of the page in docs/http.md: `python -m docs.page_screenshots http://127.0.0.1:8000/`.

Needs a running service of any model, the packages of the extra `test`, and Chromium. The reply is this file's, so that
the picture does not depend on the model.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from playwright.sync_api import Route

FOLDER = Path(__file__).parent
SIZE = {"width": 1200, "height": 900}
QUESTIONS = ("How do I write a file so that a crash never leaves half of it?",)
OLDER = ("Plan of the release notes", "Regular expression for ISO dates")
REPLY = """\
Write to a second file in the same folder, then **replace** the first one:

```python
import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    \"\"\"Replace a file's content, or leave it as it is.\"\"\"
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
```

- `os.fsync` returns when the bytes are on the disk.
- `Path.replace` is atomic within one file system.
"""


def main(url: str) -> None:
    """Write docs/page-light.png and docs/page-dark.png."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.route("**/v1/chat/completions", _answer)
            page.goto(f"{url}#chat")
            page.locator('#state[data-state="ready"]').wait_for()
            for question in (*OLDER, *QUESTIONS):
                page.click("#conversations .new")
                page.fill("#chat-text", question)
                page.press("#chat-text", "Enter")
                page.locator("#chat-messages .code-block").wait_for()
                page.locator("#chat-form .primary:enabled").wait_for()
            page.reload()  # the times of this reply say nothing
            page.locator("#chat-messages .code-block").wait_for()
            page.wait_for_timeout(1500)  # the code is coloured, the tokens are counted
            page.screenshot(path=FOLDER / f"page-{scheme}.png")
        browser.close()


def _answer(route: Route) -> None:
    """Send the reply as a stream."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in REPLY.split(" ")]
    for chunk in chunks[1:]:
        chunk["choices"][0]["delta"]["content"] = " " + chunk["choices"][0]["delta"]["content"]
    end = {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 27, "completion_tokens": 171, "total_tokens": 198},
    }
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in (*chunks, end))
    route.fulfill(
        status=200, headers={"content-type": "text/event-stream"}, body=body + "data: [DONE]\n\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

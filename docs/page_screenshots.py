"""Takes the pictures of the page in docs/http.md: `python -m docs.page_screenshots http://127.0.0.1:8000/`.

Needs a running service with the bundled model, the packages of the extra `test`, and Chromium.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent
SIZE = {"width": 1200, "height": 940}


def main(url: str) -> None:
    """Write docs/page-light.png and docs/page-dark.png."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto(url)
            page.locator('#state[data-state="ready"]').wait_for()
            load = [threading.Thread(target=_generate, args=(url, i)) for i in range(5)]
            for thread in load:
                thread.start()
                page.wait_for_timeout(2000)
            page.fill("#max-tokens", "64")
            page.fill("#seed", "2")
            page.click("#prompt .primary")
            page.locator("#prompt .primary:enabled").wait_for()
            page.locator('#prompt .token[data-level="3"]').nth(2).hover()
            page.screenshot(path=FOLDER / f"page-{scheme}.png")
            for thread in load:
                thread.join()
        browser.close()


def _generate(url: str, seed: int) -> None:
    """Give the plots something to show."""
    parameters = {"max_new_tokens": 300 + 60 * seed, "ignore_eos": True, "do_sample": True}
    body = json.dumps({"inputs": "def ", "parameters": parameters | {"seed": seed}}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "generate", body, headers)  # noqa: S310 - our own service
    with urllib.request.urlopen(request) as reply:  # noqa: S310 - our own service
        reply.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

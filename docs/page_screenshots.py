"""Takes the pictures of the page in docs/http.md: `python -m docs.page_screenshots http://127.0.0.1:8000/`.

Needs a running service with the bundled model, the packages of the extra `test`, and Chromium.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent
SIZE = {"width": 1200, "height": 800}


def main(url: str) -> None:
    """Write docs/page-light.png and docs/page-dark.png."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto(url)
            page.locator('#state[data-state="ready"]').wait_for()
            for seed in (5, 3, 9, 1, 2):
                page.fill("#seed", str(seed))
                page.click("#prompt .primary")
                page.wait_for_timeout(1200)
                page.locator("#prompt .primary:enabled").wait_for()
            page.wait_for_timeout(1500)
            page.locator('#prompt .token[data-level="3"]').nth(2).hover()
            page.screenshot(path=FOLDER / f"page-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

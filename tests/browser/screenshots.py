"""The pictures in docs/: `python -m tests.browser.screenshots`, after a change to the page; needs `make published`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from playwright.async_api import Page, expect

from pilotfish.models import published
from tests.browser.chromium import browsing, visiting
from tests.serving import serving_embedded

QUESTIONS = (
    "What is the capital of France?",
    "Give three tips for a good night's sleep.",
    "Please repeat these tips.",
)
SIZE = {"width": 1180, "height": 900}


async def converse(page: Page) -> None:
    """Ask everything, and compare the last answer."""
    page.set_default_timeout(60_000)
    await page.get_by_label("Temperature").fill("0")
    again = page.get_by_role("button", name="Regenerate")
    for question in QUESTIONS:
        await page.get_by_label("Message").fill(question)
        await page.keyboard.press("Enter")
        await expect(again).to_be_visible(timeout=60_000)
    await page.get_by_role("button", name="Compare without drafts").click()
    await expect(again).to_be_visible(timeout=60_000)


async def main(folder: Path) -> None:
    """Have one conversation in each theme."""
    target = str(published.model("smollm2"))
    async with serving_embedded(target=target, draft=()) as server, browsing() as browser:
        url = f"http://127.0.0.1:{server.app.http_port}/"
        for name in ("first", "light", "dark"):  # the first requests of a server are slower
            scheme = "dark" if name == "dark" else "light"
            async with visiting(browser, url, color_scheme=scheme, viewport=SIZE) as (page, _):
                await converse(page)
                height = await page.evaluate("document.documentElement.scrollHeight")
                await page.set_viewport_size(SIZE | {"height": height})
                if name != "first":
                    await page.screenshot(path=folder / f"playground-{name}.png")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")))

"""A real Chromium, headless, as the system's packages bring it; and what a page has to keep to whatever it does."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, Page, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# It has no sandbox of its own where tests run as root, and little shared memory where they run in a container.
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]
WIDE, NARROW = {"width": 1280, "height": 1100}, {"width": 320, "height": 800}


def executable() -> str | None:
    """Where it lies, if it is there."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """A browser of its own."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable(), args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def visiting(browser: Browser, url: str, **options: object) -> AsyncIterator[tuple[Page, list[str]]]:
    """The page in a window of its own, and what its console says of errors, exceptions among them."""
    context = await browser.new_context(**({"viewport": WIDE} | options))
    page, said = await context.new_page(), []
    page.set_default_timeout(20_000)
    page.on("console", lambda message: message.type in ("error", "warning") and said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    try:
        await page.goto(url)
        yield page, said
    finally:
        await context.close()

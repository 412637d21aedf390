"""The pictures in docs/: `python -m tests.browser.screenshots`, after a change to the page, on the embedded pair."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from playwright.async_api import expect

from tests.browser.chromium import browsing, visiting
from tests.server.worker.in_process import load_models
from tests.serving import serving


async def main(folder: Path) -> None:
    """One run in each theme."""
    async with serving(load=load_models, target="", threads=1) as server, browsing() as browser:
        url = f"http://127.0.0.1:{server.app.http_port}/"
        async with visiting(browser, url) as (page, _):  # the first requests of a server are slower
            await page.click("#run")
            await expect(page.locator("#status")).to_contain_text("with seed", timeout=20_000)
        for name, scheme, size in (
            ("playground-light", "light", {"width": 1180, "height": 960}),
            ("playground-dark", "dark", {"width": 1180, "height": 960}),
        ):
            async with visiting(browser, url, color_scheme=scheme, viewport=size) as (page, _):
                await page.fill("#seed", "2")
                await page.click("#run")
                await expect(page.locator("#status")).to_contain_text("with seed", timeout=20_000)
                await page.screenshot(path=folder / f"{name}.png", full_page=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")))

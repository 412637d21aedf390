"""The page at `/` with a published chat model, as a person uses it: Chromium, SmolLM2 from its file.

`make test-published` runs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, expect

from pilotfish.models import published
from tests.browser.chromium import browsing, executable, visiting
from tests.browser.looks import check_width
from tests.serving import serving_embedded

pytestmark = pytest.mark.skipif(executable() is None, reason="there is no Chromium here")
SIZES = {"wide": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}
PATIENCE = 60_000  # milliseconds, for an answer


@asynccontextmanager
async def open_page(size: dict[str, int], **options: object) -> AsyncIterator[tuple[Page, list[str]]]:
    target = str(published.model("smollm2"))
    async with serving_embedded(target=target, draft=(), **options) as server, browsing() as browser:
        url = f"http://127.0.0.1:{server.app.http_port}/"
        async with visiting(browser, url, viewport=size) as (page, said):
            await expect(page.get_by_label("Message")).to_be_visible()
            if size["width"] < 960:
                await page.get_by_text("Settings", exact=True).click()
            await page.get_by_label("Temperature").fill("0")
            await page.get_by_label("Maximum tokens").fill("128")  # a small model goes on and on
            yield page, said


async def say(page: Page, text: str) -> str:
    """Send a message; return the answer."""
    await page.get_by_label("Message").fill(text)
    await page.keyboard.press("Enter")
    return await whole_answer(page)


async def whole_answer(page: Page) -> str:
    await expect(page.get_by_role("button", name="Regenerate")).to_be_visible(timeout=PATIENCE)
    return await page.locator(".assistant .text").last.inner_text()


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_a_conversation_of_three_turns_with_a_stop_a_regeneration_and_a_comparison(size: dict[str, int]) -> None:
    async with open_page(size) as (page, said):
        assert "Paris" in await say(page, "What is the capital of France?")
        invitation = await say(page, "Write a short email that invites Anna to lunch on Friday.")
        assert "Anna" in invitation
        third = await say(page, "Now the same email to Ben, for Saturday.")
        assert "Ben" in third
        assert await page.locator(".assistant .draft").count() > 0  # how many depends on measured times
        await page.get_by_role("button", name="Compare without drafts").click()
        compared = page.locator(".compared p").last
        await expect(compared).to_have_text(
            re.compile(r"^The same text, token by token\. With drafts .* as fast\.$"), timeout=PATIENCE
        )
        print(await compared.text_content(), await page.locator(".figures").last.text_content())
        await page.get_by_role("button", name="Regenerate").click()
        await expect(page.get_by_role("button", name="Regenerate")).to_be_hidden()
        assert await whole_answer(page) == third  # at temperature 0
        await page.get_by_label("Maximum tokens").fill("1000")
        await page.get_by_label("Message").fill("Count from 1 to 1000, one number per line.")
        await page.keyboard.press("Enter")
        await expect(page.locator(".assistant .text").last).to_contain_text(re.compile(r"\w"), timeout=PATIENCE)
        await page.keyboard.press("Escape")
        await expect(page.locator("#status")).to_have_text("Stopped.")
        await check_width(page)
        assert said == []


async def test_a_required_function_is_called_and_its_result_used() -> None:
    async with open_page(SIZES["wide"]) as (page, said):
        await page.get_by_text("Tools", exact=True).click()
        await page.get_by_role("button", name="Insert an example").click()
        await page.get_by_label("Tool choice").select_option("get_weather")
        await say(page, "What is the weather in Oslo?")
        call = page.locator("details", has_text="Call of get_weather").first
        await call.locator("summary").click()
        assert "city" in json.loads(await call.locator("pre").inner_text())
        for field in await page.get_by_label("Result of get_weather").all():  # it may call twice
            await field.fill("rain, 7 degrees")
        await page.get_by_role("button", name="Send results").click()
        await expect(page.get_by_role("article", name="Answer")).to_have_count(2, timeout=PATIENCE)
        assert await whole_answer(page)
        assert said == []

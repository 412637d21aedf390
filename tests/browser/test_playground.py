"""The page at `/` of a base model, as a person with a browser meets it: Chromium, a real server, one process."""

from __future__ import annotations

import re
from functools import partial

import pytest
from playwright.async_api import expect

from tests.browser.chromium import NARROW, executable
from tests.browser.looks import check_themes, check_width
from tests.engine.text.test_codec import CODEC
from tests.server.fake_engine import FakeEngine
from tests.server.test_life import metric
from tests.server.test_security import ALICE
from tests.server.worker.in_process import load_models
from tests.serving import until

pytestmark = [
    pytest.mark.skipif(
        executable() is None,
        reason="the page is not tested: there is no Chromium here (Debian: apt-get install chromium)",
    ),
    pytest.mark.asyncio(loop_scope="module"),  # that of the browser, of which there is one
]

EMBEDDED = {"load": load_models, "target": "", "threads": 1, "max_model_len": 512, "warm_up_seconds": 0.0}
PROMPT = 'def mean(values):\n    """Mean of <b>values</b>."""\n'
SAME = re.compile(r"^The same text, token by token, with seed \d+\.$")


async def text_of(page, side):
    """What a side shows of the output, its prompt left out."""
    return "".join(await page.locator(f"#{side} pre span:not(.asked)").all_text_contents())


async def test_two_streams_of_one_prompt_in_two_colours_with_one_text(open_page):
    async with open_page(**EMBEDDED) as (page, said, server):
        await page.get_by_label("Prompt", exact=True).fill(PROMPT)
        await page.get_by_label("Maximum tokens").fill("48")
        await page.get_by_label("Temperature").fill("0.9")
        await page.get_by_label("Seed").fill("11")
        await page.get_by_label("Drafts per round").select_option("4")
        await page.keyboard.press("Control+Enter")
        await expect(page.locator("#status")).to_have_text(SAME)
        whole = {"prompt": PROMPT, "max_new_tokens": 48, "temperature": 0.9, "top_p": 1, "seed": 11}
        wanted = (await server.http.post("/generate", json=whole)).json()["generated_text"]
        assert await text_of(page, "drafted") == await text_of(page, "plain") == wanted
        assert await page.locator("#plain .draft").count() == 0
        colours = [
            await page.locator(f"#drafted .{kind}").first.evaluate("element => getComputedStyle(element).color")
            for kind in ("draft", "target")
        ]
        assert colours[0] != colours[1]
        assert await page.locator("#plain .passes i").count() == 48
        passes = await page.locator("#drafted .passes i").count()
        assert passes < 48
        await expect(page.locator("#per-pass")).to_have_text(f"{48 / passes:.2f}")
        for id_, form in (("gain", r"\d+\.\d\d\u00d7"), ("from-drafts", r"\d+ %"), ("accepted", r"\d+ %")):
            await expect(page.locator(f"#{id_}")).to_have_text(re.compile(f"^{form}$"))
        for side, count in (("drafted", passes), ("plain", 48)):
            await expect(page.locator(f"#{side} .end")).to_contain_text(f"48 tokens in {count} passes")
            await expect(page.locator(f"#{side} .speed")).to_have_text(re.compile(r"^[\d.,]+$"))
        assert said == []


async def test_tokens_come_as_they_are_made_and_stopping_frees_the_server(open_page):
    """By the button, by a key, and by closing the window."""
    engine = FakeEngine(step_seconds=0.02)
    async with open_page(engine) as (page, said, server):
        await page.get_by_role("combobox", name="Plain decoding").select_option("race")
        await page.get_by_label("Maximum tokens").fill("3000")
        stop = page.get_by_role("button", name="Stop")
        for cancelled, how in ((2, stop.click), (4, partial(page.keyboard.press, "Escape")), (6, page.close)):
            await page.get_by_role("button", name="Run").click()
            await expect(page.locator("#plain .target").nth(2)).to_be_visible()
            await expect(page.locator("#drafted .draft").nth(2)).to_be_visible()
            assert engine.load.num_running == 2
            assert await page.get_by_role("button", name="Run").is_disabled()
            await expect(page.locator("#drafted .speed")).to_have_text(re.compile(r"^[\d.,]+$"))
            await how()
            await until(lambda: engine.load.free_pages == engine.facts.total_pages)
            await until(
                lambda cancelled=cancelled: metric(server, "requests_total", finish_reason="cancelled") == cancelled
            )
            if not page.is_closed():
                await expect(page.locator("#status")).to_have_text("Stopped.")
                await expect(page.get_by_role("button", name="Run")).to_be_enabled()
                shown = await text_of(page, "drafted")
                assert CODEC.decode(engine.expected(3000)).startswith(shown)
                assert await page.get_by_role("alert").is_hidden()
        assert said == []


async def test_errors_are_shown_as_the_server_sends_them(open_page):
    engine = FakeEngine(step_seconds=0.02)
    async with open_page(engine, max_engine_crashes=0) as (page, _, server):
        await page.get_by_label("Temperature").fill("-1")
        await page.get_by_label("Top p").fill("7")
        await page.get_by_role("button", name="Run").click()
        body = {"prompt": "a", "temperature": -1, "top_p": 7}
        wanted = (await server.http.post("/generate", json=body)).json()["error"]["message"]
        assert "temperature" in wanted
        assert "top_p" in wanted
        await expect(page.get_by_role("alert")).to_have_text(f"400: {wanted}")
        await page.get_by_label("Temperature").fill("")  # the server's default
        await page.get_by_label("Top p").fill("")
        await page.get_by_role("button", name="Run").click()
        await expect(page.get_by_role("alert")).to_be_hidden()
        await expect(page.locator("#status")).to_have_text(SAME)
        await page.get_by_label("Maximum tokens").fill("3000")
        await page.get_by_role("button", name="Run").click()
        await expect(page.locator("#drafted .draft").nth(2)).to_be_visible()
        engine.fault = RuntimeError("secret")
        await expect(page.get_by_role("alert")).to_contain_text("the engine failed")
        assert "secret" not in await page.content()


async def test_where_a_token_is_asked_for_there_is_a_field(open_page, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {ALICE}\n")
    async with open_page(token_file=tokens) as (page, _, _):
        await page.get_by_role("button", name="Run").click()
        await expect(page.get_by_role("alert")).to_contain_text("401: authorization is missing")
        await expect(page.get_by_label("Bearer token")).to_be_focused()
        await page.keyboard.type(ALICE)
        await page.keyboard.press("Enter")
        await expect(page.locator("#status")).to_have_text(SAME)
        stored = await page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert ALICE not in stored


async def test_what_a_model_writes_is_text_and_nothing_else_and_scrolls_one_way_only(open_page):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script></pre>" + "averyveryverylongwordwithoutaspace" * 10
    async with open_page(FakeEngine(text=evil), window={"viewport": NARROW}) as (page, said, _):
        await page.get_by_label("Prompt", exact=True).fill(evil)
        await page.get_by_text("Settings", exact=True).click()
        await page.get_by_label("Maximum tokens").fill(str(len(CODEC.encode(evil))))
        await page.get_by_role("button", name="Run").click()
        await expect(page.locator("#status")).to_have_text(SAME)
        assert await text_of(page, "plain") == evil
        assert await page.locator("pre *:not(span)").count() == 0
        await page.get_by_text("Access token").click()
        await check_width(page)
        boxes = [await page.locator(f"#{side}").bounding_box() for side in ("drafted", "plain")]
        assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"]  # one below the other
        assert said == []


async def test_each_theme_is_legible_and_its_own(open_page):
    async with open_page() as (page, said, _):
        await page.get_by_label("Maximum tokens").fill("40")
        await page.get_by_role("button", name="Run").click()
        await expect(page.locator("#status")).to_have_text(SAME)
        await page.get_by_text("Access token").click()
        await check_themes(page, at_least=25)
        assert said == []


async def test_it_can_be_used_without_a_mouse(open_page):
    async with open_page() as (page, said, _):
        await page.locator("body").focus()
        reached: list[str] = []
        for _ in range(24):
            await page.keyboard.press("Tab")
            reached.append(await page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        reached = reached[reached.index("temperature") :]
        fields = ["temperature", "top-p", "top-k", "max-tokens", "seed", "drafts", "compare"]
        assert [name for name in reached if name in fields][:7] == fields
        assert reached[reached.index("compare") + 1] == "SUMMARY"
        assert reached[reached.index("prompt") :][:4] == ["prompt", "run", "PRE", "PRE"]
        await check_width(page)
        assert said == []


async def test_the_example_fits_the_model_and_a_single_token_is_one_token(open_page):
    async with open_page(**EMBEDDED) as (page, _, _):
        await expect(page.get_by_label("Prompt", exact=True)).to_have_value(re.compile("^class Point:"))
        await expect(page.get_by_label("Message")).to_be_hidden()
        await page.get_by_label("Maximum tokens").fill("1")
        await page.get_by_role("button", name="Run").click()
        await expect(page.locator("#plain .end")).to_contain_text("1 token in 1 pass and")
    async with open_page() as (page, _, _):
        await expect(page.get_by_label("Prompt", exact=True)).to_have_value(re.compile("^The .* France are$"))

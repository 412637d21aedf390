"""The page at `/` of a chat model: a conversation, in Chromium, with a fake engine that answers by its prompt."""

from __future__ import annotations

import json
import re

import pytest
from playwright.async_api import expect

from pilotfish.engine.params import SpeculationMode
from pilotfish.engine.types import FinishReason
from pilotfish.server.chat import ChatTemplate
from pilotfish.server.formats.base import ReasoningMarks
from pilotfish.server.formats.json_calls import HermesFormat
from tests.browser.chromium import NARROW, executable
from tests.browser.looks import check_themes, check_width
from tests.engine.text.test_codec import CODEC, END
from tests.server.fake_engine import FakeEngine, served
from tests.server.fake_grammar import FakeCompiler
from tests.server.http.agents import TEMPLATE
from tests.server.test_life import metric
from tests.server.test_security import ALICE
from tests.serving import until

pytestmark = [
    pytest.mark.skipif(
        executable() is None,
        reason="the page is not tested: there is no Chromium here (Debian: apt-get install chromium)",
    ),
    pytest.mark.asyncio(loop_scope="module"),  # that of the browser, of which there is one
]

[END_ID] = CODEC.encode(END)
PHONE = {"width": 390, "height": 844}
CALL = '<think>\nA city.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class TalkingEngine(FakeEngine):
    """Answers each prompt with reply(prompt), drafts included unless they are off."""

    def __init__(self, reply=lambda prompt: f"You said: {prompt}", **options):
        super().__init__(**options)
        self.reply, self.eos_token_ids = reply, frozenset({END_ID})

    def add(self, request):
        self.script = (*CODEC.encode(self.reply(CODEC.decode(request.token_ids))), END_ID)
        self._burst = 1 if request.speculation.mode is SpeculationMode.OFF else 3
        return super().add(request)

    def _reason(self, output, num_tokens, newest):
        return (FinishReason.STOP, newest) if newest == END_ID else super()._reason(output, num_tokens, newest)


def prompts(engine):
    return [CODEC.decode(request.token_ids) for request in engine.requests]


def chatting(open_page, engine, **options):
    """A page that shows a conversation with this engine."""
    fields = {"chat": ChatTemplate(TEMPLATE, {}), "format": HermesFormat(reasoning=ReasoningMarks())}
    model = served(engine, CODEC, compile_grammar=FakeCompiler(), **fields)
    return open_page(engine, load=lambda _config, _progress: model, **options)


async def say(page, text):
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


async def test_a_conversation_has_all_its_turns_and_survives_a_reload(open_page):
    engine = TalkingEngine(lambda prompt: f"Answer {prompt.count('<user>')}.")
    async with chatting(open_page, engine) as (page, said, _):
        await expect(page.get_by_label("Prompt", exact=True)).to_be_hidden()
        await page.get_by_label("System prompt").fill("Be brief.")
        for i, text in enumerate(("one", "two", "three"), 1):
            await say(page, text)
            await expect(page.get_by_role("article", name="Answer").nth(i - 1)).to_contain_text(f"Answer {i}.")
        whole = "<system>Be brief.<user>one<assistant>Answer 1.<user>two<assistant>Answer 2.<user>three<go>"
        assert prompts(engine)[-1] == whole
        spans = page.locator(".assistant .text span")
        assert set(await spans.evaluate_all("all => all.map((each) => each.className)")) == {"draft", "target"}
        colours = [
            await page.locator(f".assistant .{kind}").first.evaluate("element => getComputedStyle(element).color")
            for kind in ("draft", "target")
        ]
        assert colours[0] != colours[1]
        count = len(CODEC.encode("Answer 3.")) + 1
        await expect(page.get_by_role("article", name="Answer").last).to_contain_text(
            f"{count} tokens in {-(-count // 3)} passes"
        )
        shown = await page.get_by_role("log").inner_text()
        await page.reload()
        await expect(page.get_by_role("article", name="Answer")).to_have_count(3)
        assert await page.get_by_role("log").inner_text() == shown
        await say(page, "four")
        assert prompts(engine)[-1] == whole.replace("<go>", "<assistant>Answer 3.<user>four<go>")
        await page.get_by_role("button", name="New conversation").click()
        await expect(page.get_by_role("article")).to_have_count(0)
        await say(page, "five")
        assert prompts(engine)[-1] == "<system>Be brief.<user>five<go>"
        assert said == []


async def test_settings_are_sent_and_empty_fields_are_left_to_the_server(open_page):
    engine = TalkingEngine()
    async with chatting(open_page, engine) as (page, _, _):
        await expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "1 (default)")
        await say(page, "a")
        sampling = engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, None)
        given = {"Temperature": "0.5", "Top p": "0.9", "Top k": "7", "Maximum tokens": "1", "Seed": "-3"}
        for label, value in given.items():
            await page.get_by_label(label, exact=True).fill(value)
        await page.get_by_label("Drafts per round").select_option("off")
        await say(page, "b")
        request = engine.requests[-1]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
        assert (sampling.max_tokens, sampling.seed) == (1, 2**64 - 3)
        assert request.speculation.mode is SpeculationMode.OFF
        last = page.get_by_role("article", name="Answer").last
        await expect(last).to_contain_text(re.compile(r"1 token in 1 pass · .*cut at the maximum number of tokens$"))
        models = {"data": [{"id": "fake", "default_sampling_params": {"top_p": 0.95, "min_p": 0.1}}]}
        await page.route("**/v1/models", lambda route: route.fulfill(json=models))
        await page.reload()
        await expect(page.get_by_label("Temperature")).to_have_value("0.5")
        await expect(page.get_by_label("Top p")).to_have_attribute("placeholder", "0.95 (default)")


@pytest.mark.parametrize("how", ["button", "key"])
async def test_a_stopped_answer_stays_and_the_server_is_free(open_page, how):
    engine = TalkingEngine(lambda _: "word " * 1000, step_seconds=0.02)
    async with chatting(open_page, engine) as (page, said, server):
        await page.get_by_label("Maximum tokens").fill("2000")
        await page.get_by_label("Message", exact=True).fill("go")
        await page.get_by_role("button", name="Send").click()
        answer = page.get_by_role("article", name="Answer")
        await expect(answer).to_contain_text("word word")
        assert await page.get_by_role("log").get_attribute("aria-busy") == "true"
        await expect(page.get_by_role("button", name="Send")).to_be_disabled()
        stop = page.get_by_role("button", name="Stop")
        await (stop.click() if how == "button" else page.keyboard.press("Escape"))
        await expect(page.locator("#status")).to_have_text("Stopped.")
        await until(lambda: engine.load.free_pages == engine.facts.total_pages)
        await until(lambda: metric(server, "requests_total", finish_reason="cancelled") == 1)
        await expect(answer).to_contain_text("· stopped")
        assert await page.get_by_role("log").get_attribute("aria-busy") == "false"
        engine.reply = lambda _: "enough"
        await say(page, "more")
        assert re.fullmatch(r"<user>go<assistant>(word ?)+\w*<user>more<go>", prompts(engine)[-1])
        assert said == []


async def test_an_edited_turn_replaces_itself_and_all_that_follows(open_page):
    engine = TalkingEngine(lambda prompt: prompt.rpartition("<user>")[2].upper())
    async with chatting(open_page, engine) as (page, said, _):
        for text in ("one", "two", "three"):
            await say(page, text)
        second = page.get_by_role("article", name="You").nth(1)
        await second.get_by_role("button", name="Edit").click()
        field = page.get_by_label("Edited message")
        await expect(field).to_be_focused()
        await field.fill("zwei")
        await page.keyboard.press("Escape")
        await expect(second).to_contain_text("two")
        await second.get_by_role("button", name="Edit").click()
        await field.fill("zwei")
        await page.get_by_role("button", name="Save and answer").click()
        await expect(page.get_by_role("article", name="Answer").last).to_contain_text("ZWEI")
        await expect(page.get_by_role("article")).to_have_count(4)
        assert prompts(engine)[-1] == "<user>one<assistant>ONE<GO><user>zwei<go>"
        assert said == []


async def test_the_last_answer_can_be_had_again(open_page):
    engine = TalkingEngine(lambda _: f"answer {len(engine.requests)}")
    async with chatting(open_page, engine) as (page, said, _):
        await say(page, "one")
        await say(page, "two")
        await page.get_by_role("button", name="Regenerate").click()
        await expect(page.get_by_role("article", name="Answer").last).to_contain_text("answer 2")
        await expect(page.get_by_role("article")).to_have_count(4)
        assert prompts(engine)[-1] == prompts(engine)[-2]
        seeds = [request.sampling.seed for request in engine.requests]
        assert len(set(seeds)) == 3
        assert said == []


async def test_a_function_is_called_its_result_sent_and_used(open_page):
    engine = TalkingEngine(lambda prompt: "It rains." if "<tool" in prompt else CALL)
    async with chatting(open_page, engine) as (page, said, _):
        await page.get_by_text("Tools", exact=True).click()
        await page.get_by_role("button", name="Insert an example").click()
        await page.get_by_label("Tool choice").select_option("auto")
        await say(page, "Weather in Oslo?")
        answer = page.get_by_role("article", name="Answer").first
        for summary, text in (("Reasoning", "A city."), ("Call of get_weather", '{"city": "Oslo"}')):
            block = answer.locator("details", has_text=summary)
            await expect(block.locator("pre")).to_be_hidden()
            await block.locator("summary").click()
            await expect(block.locator("pre")).to_have_text(text)
        assert await answer.locator("details .draft").count() > 0
        await page.get_by_label("Result of get_weather").fill("rain")
        await page.get_by_role("button", name="Send results").click()
        await expect(page.get_by_role("article", name="Answer").last).to_contain_text("It rains.")
        declared = json.loads(await page.get_by_label("Functions, as a JSON list").input_value())[0]["function"]
        assert prompts(engine)[-1].startswith(f"[{json.dumps(declared)}]")
        result = re.search(r"\[(\w+) \{.*\}\]<tool (\w+) get_weather>rain<go>$", prompts(engine)[-1])
        assert result[1] == result[2]
        assert "(A city.)" in prompts(engine)[-1]
        assert said == []


async def test_a_function_can_be_required_by_name_for_one_answer(open_page):
    engine = TalkingEngine(lambda _: "Fine.")
    async with chatting(open_page, engine) as (page, _, _):
        sent = []
        page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
        await page.get_by_text("Tools", exact=True).click()
        await page.get_by_role("button", name="Insert an example").click()
        await page.get_by_label("Tool choice").select_option("get_weather")
        await page.get_by_label("Message", exact=True).fill("hi")
        await page.keyboard.press("Enter")
        await until(lambda: sent)
        assert sent[0]["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}


async def test_the_last_answer_is_compared_with_plain_decoding(open_page):
    engine = TalkingEngine(lambda _: "the quick brown fox " * 5, step_seconds=0.01)
    async with chatting(open_page, engine) as (page, said, _):
        await say(page, "go")
        await page.get_by_role("button", name="Compare without drafts").click()
        compared = page.locator(".compared")
        said_gain = re.compile(
            r"^The same text, token by token\. With drafts it was written (\d\.\d\d) times as fast\.$"
        )
        await expect(compared.locator("p")).to_have_text(said_gain)
        assert float(said_gain.match(await compared.locator("p").inner_text())[1]) > 1.2  # of nearly 3
        rows = await compared.get_by_role("row").all_inner_texts()
        count = len(CODEC.encode("the quick brown fox " * 5)) + 1
        assert re.match(rf"With drafts\s+{-(-count // 3)}\s", rows[1])
        assert re.match(rf"Without drafts\s+{count}\s", rows[2])
        first, second = engine.requests
        assert second.sampling.seed == first.sampling.seed
        assert second.speculation.mode is SpeculationMode.OFF
        engine.reply = lambda _: "the quick brown cat"
        await page.get_by_role("button", name="Compare without drafts").click()
        await expect(compared.locator("p")).to_have_text("The texts differ.")
        assert said == []


async def test_errors_are_shown_in_words_and_the_turn_can_be_tried_again(open_page, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {ALICE}\n")
    engine = TalkingEngine(lambda _: "word " * 500, step_seconds=0.02)
    async with chatting(open_page, engine, token_file=tokens, max_engine_crashes=0) as (page, _, _):
        await page.get_by_label("Maximum tokens").fill("2000")
        alert, again = page.get_by_role("alert"), page.get_by_role("button", name="Try again")
        await page.get_by_label("Message", exact=True).fill("hi")
        await page.keyboard.press("Enter")
        await expect(alert).to_contain_text("401: authorization is missing")
        await expect(page.get_by_label("Bearer token")).to_be_focused()
        await page.keyboard.type(ALICE)
        for label, value, wanted in (
            ("Functions, as a JSON list", "[{", "The functions are not valid JSON: "),
            ("Functions, as a JSON list", '[{"type": "x"}]', "400: tools[0].type is 'x'"),
            ("Temperature", "-1", "400: temperature is -1"),
            ("Seed", "1e30", "Seed is not a number that fits."),
        ):
            await page.locator("#settings details").first.evaluate("element => { element.open = true; }")
            await page.get_by_label(label, exact=True).fill(value)
            await again.click()
            await expect(alert).to_contain_text(wanted)
            await page.get_by_label(label, exact=True).fill("")
        await again.click()
        await expect(page.get_by_role("article", name="Answer")).to_contain_text("word word")
        await expect(alert).to_be_hidden()
        engine.fault = RuntimeError("secret")
        await expect(alert).to_contain_text("the engine failed")
        await expect(page.get_by_role("article", name="Answer")).to_contain_text("· ended by an error")
        assert "secret" not in await page.content()
        stored = await page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert "draft" in stored
        assert ALICE not in stored


@pytest.mark.parametrize("size", [NARROW, PHONE, {"width": 1280, "height": 900}], ids=lambda size: str(size["width"]))
async def test_what_a_model_writes_is_text_and_every_width_and_theme_is_legible(open_page, size):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>\n```\n" + "averyverylongword" * 20 + "\n```\nend"
    engine = TalkingEngine(lambda prompt: CALL if "again" in prompt else evil)
    async with chatting(open_page, engine, window={"viewport": size}) as (page, said, _):
        settings = page.get_by_text("Settings", exact=True)
        if size["width"] < 960:
            await expect(page.get_by_label("Temperature")).to_be_hidden()
            await settings.click()
        await page.get_by_label("Maximum tokens").fill("600")
        await page.get_by_text("Tools", exact=True).click()
        await page.get_by_role("button", name="Insert an example").click()
        await page.get_by_text("Access token").click()
        await say(page, evil)
        assert await page.locator(".assistant .text").text_content() == evil
        assert await page.locator(".turn :is(img, script)").count() == 0
        await page.get_by_role("button", name="Compare without drafts").click()
        await expect(page.get_by_text("The same text")).to_be_visible()
        await say(page, "again")
        await page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        await page.get_by_role("article", name="You").first.get_by_role("button", name="Edit").click()
        await check_width(page)
        await check_themes(page, at_least=20)
        assert said == []


async def test_it_can_be_used_without_a_mouse(open_page):
    engine = TalkingEngine(lambda prompt: prompt)
    async with chatting(open_page, engine) as (page, said, _):
        message = page.get_by_label("Message", exact=True)
        await expect(message).to_be_focused()
        await page.keyboard.type("a")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("b")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("article", name="Answer")).to_contain_text("a\nb")
        await expect(message).to_have_value("")
        await expect(message).to_be_focused()
        reached = []
        for _ in range(30):
            await page.keyboard.press("Tab")
            focused = "document.activeElement.labels?.[0]?.textContent || document.activeElement.textContent.trim()"
            reached.append(await page.evaluate(focused))
            outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none" or reached[-1] == await page.evaluate("document.body.textContent.trim()")
        for name in ("New conversation", "Settings", "System prompt", "Temperature", "Tools", "Edit", "Regenerate"):
            assert name in reached
        assert said == []


async def test_texts_can_be_copied(open_page):
    engine = TalkingEngine(lambda _: "```\na = 1\n```\n")
    async with chatting(open_page, engine) as (page, _, _):
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await say(page, "hi")
        for name, text in (("You", "hi"), ("Answer", "```\na = 1\n```\n")):
            await page.get_by_role("article", name=name).get_by_role("button", name="Copy").click()
            await expect(page.get_by_role("button", name="Copied")).to_be_visible()
            assert await page.evaluate("navigator.clipboard.readText()") == text
            await expect(page.get_by_role("button", name="Copied")).to_be_hidden()


async def test_a_chat_model_also_has_the_completion_form(open_page):
    engine = TalkingEngine(lambda prompt: f"{prompt} Paris")
    async with chatting(open_page, engine) as (page, said, _):
        await page.get_by_role("button", name="Completion").click()
        await expect(page.get_by_label("Message", exact=True)).to_be_hidden()
        await page.get_by_role("button", name="Run").click()
        await expect(page.locator("#status")).to_contain_text("The same text, token by token")
        assert prompts(engine)[-1] == await page.get_by_label("Prompt", exact=True).input_value()
        await page.get_by_role("button", name="Chat").click()
        await say(page, "hi")
        assert prompts(engine)[-1] == "<user>hi<go>"
        assert said == []

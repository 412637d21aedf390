"""What the page keeps to in every state: its contrasts, its labels, and that it scrolls one way only."""

from __future__ import annotations

import re

CONTRASTS = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const light = (colour) => {
    const [r, g, b] = colour.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = {};
  for (const element of document.querySelectorAll("body *")) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if ((!hasText && !element.value) || !element.checkVisibility() || element.closest(":disabled")) continue;
    const [a, b] = [numbers(getComputedStyle(element).color), ground(element)].map(light).sort((x, y) => y - x);
    found[`${element.tagName} ${element.id} ${element.className}`] = (a + 0.05) / (b + 0.05);
  }
  return found;
}"""
NAMELESS = """[...document.querySelectorAll('input, select, textarea, button')].filter(
  (e) => e.checkVisibility() && !e.labels?.length && !e.ariaLabel && !e.textContent.trim()
).length"""


async def check_themes(page, at_least):
    """Each theme is legible (WCAG 2, level AA) and its own; at least so many elements have text."""
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        contrasts = await page.evaluate(CONTRASTS)
        assert len(contrasts) >= at_least
        assert {name: found for name, found in contrasts.items() if found < 4.5} == {}
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", ground))) / (3 * 255)
        assert (brightness > 0.8) if scheme == "light" else (brightness < 0.2)


async def check_width(page):
    """Nothing is wider than the window, and no field or button lacks a name."""
    width, visible = await page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= visible == page.viewport_size["width"]
    assert await page.evaluate(NAMELESS) == 0

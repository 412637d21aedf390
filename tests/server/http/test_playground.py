"""The files of the page at `/`: what a browser is told, and that they need nobody else. `tests/browser/` uses them."""

from __future__ import annotations

import re

import pytest

from pilotfish.server.http.gateway import PAGE, PAGE_FILES
from tests.serving import http_client, serving


async def test_the_page_needs_no_token_and_loads_nothing_else(tokens):
    async with serving(token_file=tokens) as server, http_client(server) as http:
        for path in PAGE_FILES:
            answer = await http.get(path)
            assert answer.status_code == 200
            policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
            assert policy.pop("default-src") == "'none'"
            assert set(policy.values()) == {"'self'", "'none'"}
            assert {"base-uri", "form-action", "frame-ancestors"} <= policy.keys()
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert (await http.head(path)).status_code == 200
        assert (await http.post("/generate", json={"prompt": "a"})).status_code == 401


async def test_it_can_be_left_out():
    async with serving(playground=False) as server, http_client(server) as http:
        assert [(await http.get(path)).status_code for path in PAGE_FILES] == [404] * len(PAGE_FILES)


@pytest.mark.parametrize("path", sorted(PAGE.glob("*.*")), ids=lambda path: path.name)
def test_the_files_name_no_other_place_and_have_nothing_inline(path):
    text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "//" not in re.sub(r"^\s*//.*|;\s*//.*", "", text, flags=re.MULTILINE)
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script>|innerHTML|eval\(", text)
    used = set(re.findall(r'(?:href|src)="([^"]+)"', text))
    assert used <= PAGE_FILES.keys()

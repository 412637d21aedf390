"""A program for `test_peers`: says the prompt again, or ends as it is told to."""

from __future__ import annotations

import os

from benchmarks.harness.turns import Clock
from benchmarks.peers.worker import serve


class Echo:
    def __init__(self, settings):
        if settings.get("fails"):
            raise OSError("no model here")
        self.version = "echo 1"

    def run(self, prompts, tokens, k):
        if k == 13:
            os._exit(3)
        if k == 7:
            raise ValueError("cannot do seven")
        os.write(1, b"what a library prints\n")
        clock = Clock.of(len(prompts))
        clock.tokens[:] = [list(prompt[:1]) for prompt in prompts]
        clock.tick()
        clock.tokens[:] = [list(prompt[:tokens]) for prompt in prompts]
        return clock.turn()


if __name__ == "__main__":
    serve(Echo)

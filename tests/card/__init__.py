"""A CUDA device for tests on a machine that has none: its tensors lie in the CPU's memory and have values.

Engines are built with `device="cuda"`. Tensors of the two places do not mix. What the host waits for is noted, or
refused where `torch.cuda.set_sync_debug_mode` says so; what is copied to it without a wait arrives late. A graph is
what its capture recorded, by address, and plays on the memory that is there now: what was given back since is poison.
"""

from tests.card.card import Card
from tests.card.driver import here

__all__ = ["Card", "here"]

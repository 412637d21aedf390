"""A CUDA device for tests on a machine that has none: its tensors lie in the CPU's memory and have values.

Engines are built with `device="cuda"`, and the host meets what it would meet: tensors of the two places do not mix, what
it waits for is noted (or refused, where `torch.cuda.set_sync_debug_mode` says so), what is copied to it without a wait
arrives late, and a graph is what its capture recorded, by address: memory that was given back since is poisoned.
"""

from tests.card.card import Card
from tests.card.driver import here

__all__ = ["Card", "here"]

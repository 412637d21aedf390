"""The parts of `first-light` and `first-light-2`: one module per question; `catalogue` orders them."""

"""Commands of `pilotfish` other than `serve` and `generate`. Each prints its result and exits."""

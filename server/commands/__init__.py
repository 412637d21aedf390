"""Commands of `pilotfish` other than `serve`: `bench`, `check` and `health`. Each prints its result and exits."""

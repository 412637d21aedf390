"""Commands of `pilotfish` beside `serve`: `bench`, `check` and `health`. Each of them prints its result and exits."""

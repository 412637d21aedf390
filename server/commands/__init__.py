"""Commands of `pilotfish` other than `serve`: `bench`, `check`, `health`, `train-draft` and `verify`.

Each prints its result and exits.
"""

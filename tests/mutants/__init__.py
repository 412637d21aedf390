"""Faults planted on purpose, one at a time: whether the tests find what they promise to find.

`python -m tests.mutants` plants each fault of `faults.py` in a copy of the repository and runs the tests that should
find it there. A fault that no test finds is a promise that no test keeps.
"""

"""Other inference programs, each in its own process, on the same weights and prompts in the same rounds.

Pilotfish needs none of them: a program that is not installed is reported as not measured. `README.md` in this folder
explains how to install them.
"""

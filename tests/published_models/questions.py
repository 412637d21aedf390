"""Twenty short questions for a small model that chats, as a child would ask them. This module knows no model.

They were written down before any of them was asked, and none was exchanged for one that is answered better.
"""

from __future__ import annotations

QUESTIONS = (
    "How many legs has a spider?",
    "What is 2+2?",
    "What is the capital of France?",
    "What is the capital of Italy?",
    "What is the capital of Japan?",
    "What colour is the sky on a clear day?",
    "What colour is grass?",
    "How many days are in a week?",
    "How many months are in a year?",
    "What is the opposite of hot?",
    "Which planet do we live on?",
    "What do bees make?",
    "What is frozen water called?",
    "Who wrote Romeo and Juliet?",
    "What is the largest ocean?",
    "What animal says meow?",
    "What is 10 minus 3?",
    "How many minutes are in an hour?",
    "What is the first letter of the alphabet?",
    "What gas do plants take from the air?",
)
# Those of whose answers llama.cpp (llama-cpp-python 0.3.36, from the same file) does not begin with float32's sentence.
MISSED_BY_LLAMA = frozenset(
    (
        "What is the capital of France?",
        "What is the capital of Italy?",
        "How many months are in a year?",
        "What do bees make?",
        "Who wrote Romeo and Juliet?",
        "What animal says meow?",
    )
)

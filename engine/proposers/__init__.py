"""Proposers draft the next tokens. Wrong drafts cost time but never change the output."""

from engine.proposers.base import Proposer
from engine.proposers.model import ModelProposer
from engine.proposers.ngram import NGramProposer
from engine.proposers.select import Proposers
from engine.proposers.suffix import SuffixProposer

__all__ = ["ModelProposer", "NGramProposer", "Proposer", "Proposers", "SuffixProposer"]

"""Proposers draft the next tokens. Wrong drafts cost time but never change the output."""

from pilotfish.engine.proposers.base import Proposer
from pilotfish.engine.proposers.model import ModelProposer
from pilotfish.engine.proposers.ngram import NGramProposer
from pilotfish.engine.proposers.select import Proposers
from pilotfish.engine.proposers.suffix import SuffixProposer

__all__ = ["ModelProposer", "NGramProposer", "Proposer", "Proposers", "SuffixProposer"]

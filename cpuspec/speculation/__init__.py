"""Speculation: propose, score, verify. A new drafting method is one Proposer and one row of `engine.assemble.SOURCES`."""

from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import NullProposer, Proposer
from cpuspec.speculation.round import Round, speculate
from cpuspec.speculation.verify import Verdict, verify_tokens

__all__ = [
    "ChainProposer",
    "Context",
    "Draft",
    "NullProposer",
    "Proposer",
    "Round",
    "Verdict",
    "speculate",
    "verify_tokens",
]

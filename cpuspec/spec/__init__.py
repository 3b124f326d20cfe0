"""Speculation: propose, score, verify. A new drafting method is one Proposer and one row of `levels.SOURCES`."""

from cpuspec.spec.chain import ChainProposer
from cpuspec.spec.context import Context
from cpuspec.spec.draft import Draft
from cpuspec.spec.proposer import NullProposer, Proposer
from cpuspec.spec.round import Round, speculate
from cpuspec.spec.verify import Verdict, verify_block, verify_greedy, verify_sampled

__all__ = [
    "ChainProposer",
    "Context",
    "Draft",
    "NullProposer",
    "Proposer",
    "Round",
    "Verdict",
    "speculate",
    "verify_block",
    "verify_greedy",
    "verify_sampled",
]

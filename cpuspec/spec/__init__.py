"""Speculation: propose, score, verify. A new drafting method is one Proposer and one row of PROPOSERS."""

from cpuspec.spec.context import Context
from cpuspec.spec.draft import Draft
from cpuspec.spec.proposer import PROPOSERS, NullProposer, Proposer, make_proposer
from cpuspec.spec.round import Round, speculate
from cpuspec.spec.verify import Verdict, verify_block, verify_greedy, verify_sampled

__all__ = [
    "PROPOSERS",
    "Context",
    "Draft",
    "NullProposer",
    "Proposer",
    "Round",
    "Verdict",
    "make_proposer",
    "speculate",
    "verify_block",
    "verify_greedy",
    "verify_sampled",
]

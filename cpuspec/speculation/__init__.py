"""Speculation: propose, score, verify. To add a drafter: a Proposer, and a row of LOOKUPS or MODELS in `engine.draft_spec`."""

from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import NullProposer, Proposer
from cpuspec.speculation.round import Round, speculate
from cpuspec.speculation.verify import Verdict, verify_tokens

__all__ = ["ChainProposer", "Context", "Draft", "NullProposer", "Proposer", "Round", "Verdict", "speculate", "verify_tokens"]

"""Drafters without a model of their own, and translation between vocabularies. A new drafter is one file."""

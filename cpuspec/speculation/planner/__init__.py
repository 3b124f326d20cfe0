"""The choice of a drafter and of a draft's length, from measured costs and learned acceptance."""

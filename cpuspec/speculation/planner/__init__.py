"""Which drafter drafts, and how many tokens: measured costs, learned acceptance, and the choice between them."""

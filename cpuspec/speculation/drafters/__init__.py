"""The ways to draft: lookups, trained heads, masks, a user's class; and translation between vocabularies. One file each."""

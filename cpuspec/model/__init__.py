"""The one decoder-only transformer: its formulas, rotary tables, batches and the KV cache."""

"""The one decoder-only transformer: its weights by canonical name, rotary tables, batches and the KV cache."""

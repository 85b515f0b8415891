"""From sources to packed batches: conversations, regenerated responses, tokens with a loss mask, draft vocabulary."""

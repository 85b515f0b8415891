"""From conversations to token ids with a loss mask, and the draft vocabulary counted from them."""

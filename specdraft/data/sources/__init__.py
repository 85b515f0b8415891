"""Where conversations and prompts come from: files, data sets, the standard library, and mixtures of them."""

"""A chat in which every token shows whether it was drafted: the conversation, its speed, the terminal."""

"""Our drafters inside an engine's own process, where the engine hands over tokens and takes drafts."""

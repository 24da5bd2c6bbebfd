"""Text on its way to the engine: chat templates, tokens, grammars."""

"""Which backend runs a context, and from its config to a runtime; nothing else knows them all."""

"""One graph per bucket of tokens: capture, replay, and the rules that keep a replay right."""

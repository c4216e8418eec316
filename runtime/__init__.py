"""The runtime: token ids in, token ids out, at the speed of the memory bus. Never imports models, server or bench."""

"""The server: OpenAI's HTTP API in front of one engine. Never imported by models, runtime or bench."""

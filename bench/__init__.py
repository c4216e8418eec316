"""The measuring room: latency and teacher-forced checks, each a subcommand of `python -m bench`. Never imports the server."""

"""The `ringserve` command: one file a subcommand."""

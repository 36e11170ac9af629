"""The `tandem` command, and the subcommands that start or control a cluster."""

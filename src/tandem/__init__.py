"""The `tandem` command and the launchers behind it."""

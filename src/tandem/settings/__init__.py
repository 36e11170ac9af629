"""Settings: config fields with flags, set by command line, `TANDEM_*` variables and config file."""

"""The transport `file` of Tandem: KV through a directory that both nodes share."""

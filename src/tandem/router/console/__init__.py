"""The router's console: a web page and the JSON document behind it."""

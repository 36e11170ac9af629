"""`tandem top`: the router's page in a terminal."""

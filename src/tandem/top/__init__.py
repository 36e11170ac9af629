"""`tandem top`: the router's dashboard in a terminal."""

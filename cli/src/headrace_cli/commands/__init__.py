"""One module for each family of commands: parse, call the client or the launcher, show."""

"""Web pages as conversations: a browser, what a model sees of its page and may do in it, and a made shop."""

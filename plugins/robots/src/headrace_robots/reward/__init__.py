"""The reward service's side: scorers that read the pictures of episodes."""

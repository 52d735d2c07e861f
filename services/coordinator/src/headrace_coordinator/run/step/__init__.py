"""The stages of one step: generate, score, learn, certify."""

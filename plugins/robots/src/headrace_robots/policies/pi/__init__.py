"""π0 and π0.5: a PaliGemma that is read once, and an action expert that follows a flow."""

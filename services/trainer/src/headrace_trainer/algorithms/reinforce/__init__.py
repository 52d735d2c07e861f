"""REINFORCE and its relatives: rewards against a baseline, without or with PPO's clip."""

"""Policy versions: cast into the weight store's memory as a step commits, and published once the ledger has it."""

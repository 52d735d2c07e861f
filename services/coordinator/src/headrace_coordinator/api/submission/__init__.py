"""What is checked when a spec is submitted, so that nothing starts in vain.

`submissions` resolves a spec once into a `Submission`, asks the rules of `rules.RULES`, then instances.
"""

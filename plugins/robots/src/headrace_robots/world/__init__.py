"""World models: dynamics learned from real episodes, in which policies act as in a simulator."""

"""What a run learns from: answers of a language model, of one policy or several. `workloads` adds what plug-ins know.

A kind checks a run as it opens and chooses its parts: how groups are read, algorithm, backend, learner, export.
"""

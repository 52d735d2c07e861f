"""The trainer's side: the kind of run, algorithms, backends and learner of episodes."""

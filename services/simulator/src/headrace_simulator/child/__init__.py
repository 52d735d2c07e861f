"""A child process and all that lives in it: environments, their episodes, variants and videos."""

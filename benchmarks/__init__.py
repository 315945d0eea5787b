"""One script a question; each prints the command, the machine and the versions it ran with."""

"""One folder an op, each with its plain-torch reference. Imports torch, triton and the standard library."""

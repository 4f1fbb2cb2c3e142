"""The code that runs inside a sandbox.

Every program waits for the imports of this package, so it uses little of the standard library and nothing else:
`typing`, `json` and `re` would take longer than the rest together. Its imports are relative because the sandboxed
process starts without the package around it.
"""

"""What runs inside of a sandbox.

Every program pays for what is imported here, so it is the standard library only, and little of that: `typing`, `json`
and `re` would take longer than all the rest. The imports are relative because it starts without the package around it.
"""

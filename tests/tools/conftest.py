"""The fixtures of commands that train, for those that look."""

from cli.conftest import in_an_empty_folder, with_the_shared_cache

__all__ = ["in_an_empty_folder", "with_the_shared_cache"]
